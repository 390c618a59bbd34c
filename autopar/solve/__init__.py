"""Exact and bounded minimization over one label per node: numbers only.

In: a `Problem`: costs of nodes and edges, memory at instants, a limit.
Out: a `Solution`: an assignment, a lower bound, how sure the two are.
Imported by: formulate, planner, pipeline, transforms, api, comparison.
"""
