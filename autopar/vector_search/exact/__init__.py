"""Exact search.

In: vectors.
Out: an index without loss.
Imported by: vector_search.choose_index, vector_search.build.
"""
