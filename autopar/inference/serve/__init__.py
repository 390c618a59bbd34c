"""Serve a model: requests in, generated text out.

In: a `Checkpoint`, options, requests.
Out: `Engine`, `Generation`.
Imported by: users, through `autopar.inference`; cli.
"""
