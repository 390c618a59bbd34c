"""The optimization problem of a step on one mesh.

In: groups of nodes and their prices; a solution.
Out: a `Problem`, and what its labels mean; of a solution the `ExplicitProgram`.
Imported by: xla_model, planner, pipeline, api.
"""
