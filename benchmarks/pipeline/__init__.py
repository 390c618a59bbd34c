"""Pipelines, part by part: `parts.py` is the benchmark, each part a module with `measure() -> rows`."""
