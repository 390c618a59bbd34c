"""Serve versioned stores to workers in other processes: control by JAX's coordination service, arrays by its transfer library.

In: a `VersionedStore` in each server process; pulls and pushes of worker processes.
Out: the same results as in one process; an error that names a process that died.
Imported by: users, through `VersionedStore.serve` and `autopar.StoreClient`.
"""
