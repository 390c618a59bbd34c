"""Estimates of a search for devices that need not exist.

In: sizes, a hardware profile.
Out: layouts, latency, bytes.
Imported by: cli.
"""
