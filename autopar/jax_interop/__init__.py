"""The only door to JAX's internals: `jax._src`, `jax.extend`, `jaxlib`.

In: JAX objects of any supported version.
Out: one interface to them; PartitionSpecs; executables and a compilation cache on disk.
Imported by: every package below it.
"""
