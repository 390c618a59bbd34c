"""Turn a user's call into flat arrays and a `Graph`, and results into what the user's step returns.

In: a step of Flax, NNX, equinox or plain JAX, and its arguments: Step.open(args, kwargs) -> Call.
Out: arrays, a trace, a `Graph`; Call.finish(arrays).
Imported by: every package below it.
"""
