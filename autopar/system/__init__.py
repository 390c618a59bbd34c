"""Services of the operating system and of text: no JAX, and no word of this domain.

In: files, processes, numbers and names.
Out: atomic and checksummed files, units, tables, patterns, progress on a terminal.
Imported by: every package.
"""
