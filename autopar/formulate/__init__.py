"""Formulate the optimization problem of a step on one mesh, and apply its solution.

In: groups of nodes and their costs; a solution.
Out: a `Problem` and the meaning of its labels; the `ExplicitProgram` of a solution.
Imported by: xla_model, planner, pipeline, api.
"""
