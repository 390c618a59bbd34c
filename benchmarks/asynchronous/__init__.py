"""Measure asynchronous pipelines."""
