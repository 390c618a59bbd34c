"""Define one iteration as a pure function of arrays: forward pass, sampling, verification of draft tokens.

In: tokens, pages, sampling parameters.
Out: the next tokens.
Imported by: inference.serve, inference.estimate.
"""
