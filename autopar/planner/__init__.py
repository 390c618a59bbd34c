"""Search over meshes, shardings, memory and overlap.

In: a `Program` and what the user wants of its plan.
Out: a `Plan`.
Imported by: pipeline, api, verification, diagnosis, comparison, inference, vector_search.
"""
