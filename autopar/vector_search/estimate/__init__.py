"""An index planned for absent devices.

In: sizes, a hardware profile.
Out: layouts, latency, bytes.
Imported by: cli.
"""
