"""Array functions: distances, top-k, k-means, pruning, re-ranking.

In: arrays.
Out: arrays.
Imported by: the packages of vector_search above it.
"""
