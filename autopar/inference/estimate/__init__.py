"""An engine planned for absent devices.

In: a model, a hardware profile, a load.
Out: layouts, latency, throughput, bytes.
Imported by: cli.
"""
