"""Layers to stages: dynamic programs over numbers.

In: prices of layers on submeshes.
Out: stage bounds, submeshes, a bound on the step time.
Imported by: pipeline.search, pipeline.cut.
"""
