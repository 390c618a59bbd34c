"""Rematerialization: compute forward values again in the backward pass instead of keeping them in memory.

In: a trace, which nodes to compute again and before which.
Out: the rewritten trace.
Imported by: `transforms.program`, planner.
"""
