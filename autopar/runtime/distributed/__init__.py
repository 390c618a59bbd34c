"""Support several processes under `jax.distributed`: one plan, local batches, fault attribution.

In: the processes of one job.
Out: agreement on the plan, global arrays, a watchdog, and the process at fault.
Imported by: api, versions, pipeline, inference.
"""
