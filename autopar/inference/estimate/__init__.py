"""Predict latency, throughput and memory of serving a model on absent devices.

In: a model's configuration, a hardware profile, a workload.
Out: shardings, TTFT, TPOT, tokens per second, bytes.
Imported by: cli.
"""
