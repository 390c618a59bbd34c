"""Hold the constants of devices and their links, as data without cost formulas.

In: the name of a profile, or a TOML file.
Out: `HardwareProfile`, with the constants of XLA's latency estimator for the device.
Imported by: every package below it.
"""
