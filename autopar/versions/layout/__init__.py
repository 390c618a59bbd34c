"""Lay out arrays over servers, without JAX: which server has which keys and rows, so that the slowest takes least time.

In: the sizes of arrays, the links and update rates of servers, the number of workers.
Out: a `Layout`, with the seconds of each server and a lower bound.
Imported by: versions.
"""
