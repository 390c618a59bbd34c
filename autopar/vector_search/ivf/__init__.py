"""Inverted files (IVF): inverted lists of vectors or of product-quantized codes.

In: vectors.
Out: an index of lists.
Imported by: vector_search.choose_index, vector_search.build.
"""
