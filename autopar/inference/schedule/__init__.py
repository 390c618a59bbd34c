"""Continuous batching: which tokens run in the next iteration.

In: requests, free pages.
Out: an iteration.
Imported by: the packages of inference above it.
"""
