"""One iteration as a function of arrays: forward pass, sampling, verified guesses.

In: tokens, pages, sampling options.
Out: next tokens.
Imported by: inference.serve, inference.estimate.
"""
