"""Inputs, metrics, placement and files of an index.

In: vectors and options.
Out: checked arrays, scores, index files with digests.
Imported by: the packages of vector_search above it.
"""
