"""Sharding rules: how each primitive may be split, as named factors.

In: a node of the `Graph`.
Out: factors, strategies, and the groups of nodes that are split alike; all rules stand in `table.RULES`.
Imported by: frontend, cost, formulate, transforms, xla_model, planner, runtime, pipeline, api, inference, code_export.
"""
