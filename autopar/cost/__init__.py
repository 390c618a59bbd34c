"""Prices in seconds and bytes: kernels, collectives, resharding, halos.

In: shapes, shardings, a hardware profile, which has every constant of the device.
Out: seconds and bytes.
Imported by: every package below it.
"""
