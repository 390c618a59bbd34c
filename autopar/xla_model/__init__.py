"""What XLA's GPU pipeline makes of a sharded step: SPMD partition, fusion, buffer assignment, combiner, latency hiding.

In: a `Graph`, shardings, a hardware profile.
Out: a `DeviceProgram`, its peak memory, its timeline.
Imported by: planner, pipeline.
"""
