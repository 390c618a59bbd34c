"""What all approximate indexes share: programs, filters, re-ranking, tuning to a recall target.

In: a search `Method`.
Out: an index.
Imported by: vector_search.exact, ivf and graph.
"""
