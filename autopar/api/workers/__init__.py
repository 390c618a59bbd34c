"""Run a step by data-parallel workers around versioned weights, under a consistency policy.

In: a user's step, a policy, the workers' devices.
Out: `WorkersStep`. The step is cut into the part of a worker and the update, both are planned, and a `VersionedStore` holds the state.
Imported by: api, through `parallelize(step, consistency=...)`.
"""
