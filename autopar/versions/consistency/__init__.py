"""Consistency policies, without JAX: which version of the weights a worker may read, and when updates are applied.

In: the clocks of the workers, the updates that they pushed.
Out: whether a read must wait, and the updates to apply or to discard; `table` has all policies, `simulate` runs one.
Imported by: versions.
"""
