"""Search for the number of stages, their submeshes, microbatches and memory.

In: a `Program`, a mesh of hosts, a schedule.
Out: a `PipelinePlan`.
Imported by: api, verification.
"""
