"""Provide files, text formatting and other services without JAX and without domain knowledge.

In: files, processes, numbers and names.
Out: atomic and checksummed files, units, tables, patterns, progress on a terminal.
Imported by: every package.
"""
