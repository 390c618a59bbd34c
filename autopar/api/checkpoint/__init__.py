"""Save and restore checkpoints under any plan, with a digest of every array.

In: the state of a planned step.
Out: numbered folders, written atomically; the state under another plan.
Imported by: users, through `autopar.Checkpoints`.
"""
