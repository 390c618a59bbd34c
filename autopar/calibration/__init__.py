"""Calibrate the cost model: benchmark the local devices, and fit a hardware profile to the timings.

In: local devices, or a JAX profile of a run.
Out: a profile file, with the errors of the fit.
Imported by: cli, benchmarks.
"""
