"""Pipeline schedules: the order of tasks on each submesh, simulated and verified.

In: numbers of stages and microbatches, and durations of tasks.
Out: tasks by submesh, makespan, bubble, and microbatches in flight. `table` has all schedules.
Imported by: the other packages of pipeline.
"""
