"""The optimization problem of a step on one mesh.

In: groups of nodes and their prices.
Out: a `Problem`, and what its labels mean.
Imported by: xla_model, planner, pipeline.
"""
