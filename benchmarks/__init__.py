"""The measurements that the README and the docs quote: `python -m benchmarks.run`."""
