"""XLA's compiler in a worker process, for GPUs that are absent or here, and its HLO read back.

In: a lowered program, a target.
Out: optimized HLO, its collectives, memory, time.
Imported by: verification, diagnosis, cli.
"""
