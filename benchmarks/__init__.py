"""Measurements that the README quotes: `python -m benchmarks.run`."""
