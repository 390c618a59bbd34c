"""Update an index on disk while it is searched: a log, a delta in memory, and lists or a graph on pages that are never changed in place.

In: inserts, deletes and upserts; a folder.
Out: an `UpdatableIndex`, which survives crashes.
Imported by: vector_search.build.
"""
