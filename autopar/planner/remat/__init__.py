"""Which values to recompute: candidates, their costs, a minimum cut.

In: a `Graph`, a memory budget.
Out: sets of nodes to compute again, cheapest first.
Imported by: planner.
"""
