"""A dim that is cut into equal parts becomes two dims, so that what stands beside the parts can be split.

In: a trace.
Out: the trace with such dims as two, and how to undo it.
Imported by: `transforms.program`, planner.
"""
