"""Neighbour graphs and their beam search.

In: vectors.
Out: an index of edges.
Imported by: vector_search.choose_index, vector_search.build.
"""
