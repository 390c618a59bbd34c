"""Predict the time of kernels, collectives, resharding and halo exchange.

In: shapes, shardings, and a hardware profile with every constant of the device.
Out: seconds and bytes.
Imported by: every package below it.
"""
