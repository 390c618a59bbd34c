"""Checkpoints that any plan restores, with a digest of every array.

In: the state of a planned step.
Out: numbered folders, whole or absent; a state under another plan.
Imported by: users, through `autopar.Checkpoints`.
"""
