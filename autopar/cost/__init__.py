"""Prices in seconds and bytes: kernels, collectives, resharding, halos.

In: shapes, shardings, a hardware profile, which has every constant of the device.
Out: seconds and bytes.
Imported by: formulate, xla_model, planner, pipeline, xla_compiler, calibration.
"""
