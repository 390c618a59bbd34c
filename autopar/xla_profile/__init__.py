"""Read a JAX profile of a run: time per HLO instruction, steps, exposed communication.

In: the folder or file that `jax.profiler.trace` wrote.
Out: `Profile`, with the optimized HLO of the program that ran.
Imported by: verification, calibration.
"""
