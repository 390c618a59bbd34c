"""Run attention with its sequence sharded over mesh axes (context parallelism), forward and backward.

In: inside `jax.shard_map`, a device's contiguous part of the tokens, the axes, a method, a kernel for one device.
Out: the same part of the output, or of the gradients; `methods` lists the methods, `primitive` runs equations.
Imported by: runtime.
"""
