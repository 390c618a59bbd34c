"""Versioned stores whose workers and servers may die, join and leave: replicas of servers, and shares of the batch that are dealt again.

In: a `VersionedStore` in each server process, worker processes, and a keeper that knows who is alive.
Out: the updates of every share in every clock, each applied once.
Imported by: users, through `autopar.StoreKeeper`, `autopar.serve_replica` and `autopar.ElasticWorker`.
"""
