"""A plan run through `jax.jit`: constraints replayed, manual regions, XLA's options.

In: a `Plan` and the trace it was made of.
Out: a jitted function.
Imported by: pipeline, api, inference, verification, diagnosis, code_export.
"""
