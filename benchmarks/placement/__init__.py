"""Measure the placement of many models on one cluster: `parts.py` is the benchmark, and each part is a module."""
