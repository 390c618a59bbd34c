"""Several processes under `jax.distributed`: one plan, the local batch of each host, faults by name.

In: processes of one job.
Out: agreement on the plan, arrays placed, a watchdog, who failed and where.
Imported by: api, pipeline, inference.
"""
