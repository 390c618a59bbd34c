"""Compile with XLA in a worker process, for local or absent GPUs, and parse the optimized HLO.

In: a lowered program, a target.
Out: optimized HLO, its collectives, memory, time.
Imported by: xla_replay, xla_profile, verification, calibration, diagnosis, cli, vector_search.
"""
