"""Define the intermediate representations (IR) that passes exchange, without JAX.

In: nothing but `errors`.
Out: `MeshShape`, `TensorSharding`, `Graph` and `ExplicitProgram` with their verifier, `DeviceProgram`, placements.
Imported by: every package below it.
"""
