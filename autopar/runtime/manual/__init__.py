"""Run nodes on local shards under `shard_map`, where XLA's partitioner would all-gather.

In: an equation, its shardings, and the local shard of each operand.
Out: results sharded by the rule; `table` has an entry for each primitive.
Imported by: runtime, pipeline.
"""
