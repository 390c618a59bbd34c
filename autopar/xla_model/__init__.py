"""Model XLA's GPU passes: SPMD partitioner, fusion, buffer assignment, collective combiner, latency hiding.

In: a `Graph`, shardings, a hardware profile.
Out: a `DeviceProgram`, its peak memory, its timeline.
Imported by: planner, pipeline.
"""
