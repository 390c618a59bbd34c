"""Partition layers into stages on submeshes by dynamic programming over numbers.

In: the costs of layers on submeshes.
Out: the layers and the submesh of each stage, and a lower bound on the step time.
Imported by: pipeline.search, pipeline.cut.
"""
