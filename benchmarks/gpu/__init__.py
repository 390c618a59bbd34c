"""Measurements on a host with GPUs, by one command: `python -m benchmarks.gpu`."""
