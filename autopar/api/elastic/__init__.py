"""Train as a member of a job under `autopar keep`: state from the memory of peers, batches by position, copies in the background.

In: a planned step, a function that creates its state, batches from a position on.
Out: `ElasticRun`: the same training, whichever members fail, leave and return.
Imported by: users, through `autopar.join`.
"""
