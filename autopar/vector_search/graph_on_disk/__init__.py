"""Neighbour graphs on disk: nodes packed into blocks of pages, of which a search reads those that its beam leads to.

In: vectors, or chunks of a corpus larger than memory; a path.
Out: a `GraphDiskIndex`, or a page file.
Imported by: vector_search.build.
"""
