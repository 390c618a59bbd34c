"""The shared part of all approximate indexes: programs, filters, re-ranking, recall tuning.

In: a search `Method`.
Out: an index.
Imported by: vector_search.exact, ivf and graph.
"""
