"""Indexes on disk: inverted lists in a file of checksummed pages, of which a search reads only the lists it probes.

In: vectors, or chunks of a corpus larger than memory; a path.
Out: a `DiskIndex`, or an index file of pages.
Imported by: vector_search.build.
"""
