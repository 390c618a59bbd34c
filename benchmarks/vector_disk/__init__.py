"""Vector search on disk: `parts.py` is the benchmark, and each part is a module with `measure() -> rows`."""
