"""A graph on disk that changes: deletions and insertions are merged into it at checkpoints (FreshDiskANN, arXiv 2105.09613).

In: a graph whose nodes are slots, vectors that were deleted and inserted.
Out: searches of a snapshot, and a graph on pages that are never changed in place.
Imported by: vector_search.updates.
"""
