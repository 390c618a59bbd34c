"""Distances, top-k, k-means, pruning: functions of arrays.

In: arrays.
Out: arrays.
Imported by: the packages of vector_search above it.
"""
