"""Attention: kernels on several devices."""
