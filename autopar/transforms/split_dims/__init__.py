"""Split a dim that is cut into equal parts in two, so that the dim within the parts can be sharded.

In: a trace.
Out: the trace with such dims as two, and how to undo it.
Imported by: `transforms.program`, planner.
"""
