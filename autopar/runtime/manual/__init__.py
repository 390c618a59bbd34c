"""Nodes that each device runs on its own part under `shard_map`, where XLA's partitioner would gather.

In: an equation, its shardings, the part of each operand that is here.
Out: results split as the rule says; `table` has an entry for each primitive.
Imported by: runtime, pipeline.
"""
