"""Search an index that is divided among servers: each has some of the lists, and a router requests those it needs.

In: an index on disk.
Out: a part per server; servers; a `ServedIndex` that sends them requests.
Imported by: cli.
"""
