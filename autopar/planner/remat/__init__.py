"""Choose the values to recompute (activation checkpointing): candidates, their costs, a minimum cut.

In: a `Graph`, the assignment of a plan, its device program.
Out: sets of nodes to compute again, in order of the memory that they save.
Imported by: planner.
"""
