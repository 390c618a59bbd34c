"""Gradient accumulation: run the batch in microbatches and add up the gradients.

In: a trace, a number of microbatches.
Out: the trace as a loop over microbatches.
Imported by: `transforms.program`, planner, pipeline.
"""
