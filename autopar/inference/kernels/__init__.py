"""Compute paged attention with one of several backends, and select the fastest.

In: queries, pages, page tables.
Out: attention outputs.
Imported by: the packages of inference above it.
"""
