"""Trace to trace: rewritten forms of a step that compute the same.

In: a trace.
Out: a `Program`: the trace with dims split in two, a loop over microbatches, or activations recomputed.
Imported by: every package below it.
"""
