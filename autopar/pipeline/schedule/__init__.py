"""Schedules: tasks of stages and microbatches in an order, simulated and verified.

In: numbers of stages and microbatches, durations.
Out: tasks by device, makespan, bubble, activations in flight; `table` has all schedules.
Imported by: the other packages of pipeline.
"""
