"""The engine: requests in, text out.

In: a `Checkpoint`, options, requests.
Out: `Engine`, `Generation`.
Imported by: users, through `autopar.inference`; cli.
"""
