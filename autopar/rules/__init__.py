"""Sharding rules: how each primitive may be split, as named factors.

In: a node of the `Graph`.
Out: factors, strategies, and the groups of nodes that share one strategy; `table.RULES` has all rules.
Imported by: frontend, cost, formulate, transforms, xla_model, planner, runtime, versions, pipeline, api, inference, code_export.
"""
