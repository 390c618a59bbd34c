"""The values that every pass speaks, without JAX.

In: nothing of this package but `errors`.
Out: `MeshShape`, `TensorSharding`, `Graph` and `ExplicitProgram` with their verifier, `DeviceProgram`, placements.
Imported by: every package below it.
"""
