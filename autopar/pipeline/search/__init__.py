"""Search for the stages, submeshes, microbatches and schedule of a step.

In: a `Program`, a cluster, and a request.
Out: a `PipelinePlan`.
Imported by: api, verification.
"""
