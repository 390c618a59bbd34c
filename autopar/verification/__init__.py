"""Predicted figures beside those of the compiled program.

In: a `Plan`, a compiler.
Out: a `Verification`, with tolerances.
Imported by: diagnosis, vector_search, cli.
"""
