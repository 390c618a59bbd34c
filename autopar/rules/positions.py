"""Say which primitives keep and cut the positions of elements, and which keep zeros.

In: nothing. Out: sets of primitives, for passes that follow elements of known value or position through a program.
"""

from __future__ import annotations

#: Primitives that keep what is known of all elements of a part of their operand, next to those that lay it out anew.
KEEP = frozenset({"stop_gradient", "optimization_barrier", "reduce_precision", "slice"})
#: Primitives of one operand that make zeros of zeros.
ZERO_TO_ZERO = frozenset({"neg", "tanh", "sin", "sqrt", "abs", "sign", "integer_pow", "square", "cumsum", "reduce_sum"})
#: Primitives that take a range of a dim, or extend it, by parameters.
CUT_OR_PAD = frozenset({"slice", "pad"})
#: Primitives that cut or join data along a dim.
CUT = CUT_OR_PAD | {"concatenate", "dynamic_slice", "gather"}
