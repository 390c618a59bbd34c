"""Vector search, part by part: `parts.py` is the benchmark, each part a module with `measure(of) -> rows`."""
