"""How a user's call becomes flat arrays, and how the arrays that come back become what the user's step returns.

Step.open(args, kwargs) -> Call: trees of arrays, a pure function of them, a key -> Call.finish(arrays)
"""
