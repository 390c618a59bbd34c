"""Rematerialization: forward values computed again in the backward pass instead of held.

In: a trace, which nodes to compute again and before which.
Out: the rewritten trace.
Imported by: `transforms.program`, planner.
"""
