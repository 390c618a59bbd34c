"""Execution of a pipeline plan: instructions, transfers, deferred reductions.

In: a `PipelinePlan` and its stage programs.
Out: a function with the signature of the step.
Imported by: api, verification.
"""
