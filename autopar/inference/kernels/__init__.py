"""Paged attention, by back end, and which one to take.

In: queries, pages, tables.
Out: attention outputs.
Imported by: the packages of inference above it.
"""
