"""Gradient accumulation: the batch split over time, sums kept apart.

In: a trace, a number of microbatches.
Out: the trace as a loop over microbatches.
Imported by: `transforms.program`, planner, pipeline.
"""
