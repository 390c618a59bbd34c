"""Run a plan through `jax.jit`: replayed sharding constraints, manual regions, XLA options.

In: a `Plan` and the trace it was made from.
Out: a jitted function.
Imported by: versions, pipeline, api, inference, verification, diagnosis, code_export.
"""
