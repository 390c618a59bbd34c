"""Numbers only: a `Problem` in, a `Solution` out; no graph, no mesh, no JAX."""
