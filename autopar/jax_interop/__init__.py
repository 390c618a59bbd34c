"""Wrap JAX's internals: only this package imports `jax._src`, `jax.extend` and `jaxlib`.

In: JAX objects of any supported version.
Out: one interface to them; PartitionSpecs; executables and a compilation cache on disk.
Imported by: every package below it.
"""
