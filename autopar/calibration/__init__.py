"""A machine measured, a hardware profile fitted.

In: devices that are here.
Out: a profile file, with its errors.
Imported by: cli, benchmarks.
"""
