"""Manage the paged KV cache: page pool, page tables, prefix cache.

In: sequences and their tokens.
Out: pages, shared between sequences with a common prefix.
Imported by: the packages of inference above it.
"""
