"""The paged KV cache: pool, tables, prefix tree.

In: sequences and their tokens.
Out: pages, shared by prefix.
Imported by: the packages of inference above it.
"""
