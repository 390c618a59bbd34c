"""Export a plan as plain JAX source code.

In: a `Plan` and its step.
Out: a Python file that needs no autopar.
Imported by: cli.
"""
