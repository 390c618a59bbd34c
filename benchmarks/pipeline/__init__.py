"""Pipeline benchmarks: `parts.py` is the benchmark, and each part is a module with `measure() -> rows`."""
