"""Schedule requests by continuous batching: decide which tokens the next iteration computes.

In: requests, free pages.
Out: iterations.
Imported by: the packages of inference above it.
"""
