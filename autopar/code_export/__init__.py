"""A plan written as plain JAX source.

In: a `Plan` and its step.
Out: a Python file that needs no autopar.
Imported by: cli.
"""
