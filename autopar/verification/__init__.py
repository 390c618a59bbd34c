"""Compare a plan's predictions with the program that XLA compiles.

In: a `Plan`, a compiler.
Out: a `Verification`: predicted and compiled figures with tolerances.
Imported by: diagnosis, vector_search, cli.
"""
