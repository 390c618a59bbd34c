"""Exact search.

In: vectors.
Out: an index with recall 1.
Imported by: vector_search.choose_index, vector_search.build.
"""
