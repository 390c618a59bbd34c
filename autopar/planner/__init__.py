"""Search over meshes, shardings, memory and overlap.

In: a `Program`, a `PlanRequest`.
Out: a `Plan`.
Imported by: pipeline, api, verification, diagnosis, comparison, inference, placement, vector_search, cli.
"""
