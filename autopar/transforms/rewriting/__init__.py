"""Equations written one by one into a new trace.

In: equations and replacements of their operands.
Out: a trace.
Imported by: the other packages of transforms.
"""
