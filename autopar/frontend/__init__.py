"""A user's call becomes flat arrays and a `Graph`; what comes back becomes what the user's step returns.

In: a step of Flax, NNX, equinox or plain JAX, and its arguments: Step.open(args, kwargs) -> Call.
Out: arrays, a trace, a `Graph`; Call.finish(arrays).
Imported by: every package below it.
"""
