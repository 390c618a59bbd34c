"""Evaluate primitives on operands that broadcast against each other, with numpy or `jax.numpy`.

In: a primitive's name and the values of its literal operands. Out: a function of the array module, the equation's parameters and
the operands. Casts are identities, so that a program can be evaluated in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

#: A function of the array module, the equation's parameters, and the operands.
Function = Callable[..., Any]


def _named(name: str) -> Function:
    return lambda xp, _, *operands: getattr(xp, name)(*operands)


def _select(xp: Any, _: Any, which: Any, first: Any, second: Any) -> Any:
    return xp.where(which, second, first)


def _same(_xp: Any, _params: Any, operand: Any, *_rest: Any) -> Any:
    return operand


_SAME = dict.fromkeys(("convert_element_type", "copy", "name", "stop_gradient"), _same)
#: Functions without kinks in their floating-point operands: random operands tell any two of their compositions apart. The gradient
#: of a softmax that does not ignore its maximum compares for equality, which distinguishes nothing else.
_SMOOTH: Mapping[str, Function] = MappingProxyType(
    {
        **_SAME,
        **dict.fromkeys(("add", "add_any"), _named("add")),
        "sub": _named("subtract"),
        "mul": _named("multiply"),
        "div": _named("divide"),
        "neg": _named("negative"),
        "exp": _named("exp"),
        "exp2": _named("exp2"),
        "log": _named("log"),
        "sqrt": _named("sqrt"),
        "rsqrt": lambda xp, _, x: 1 / xp.sqrt(x),
        "square": _named("square"),
        "integer_pow": lambda xp, params, x: xp.power(x, float(params["y"])),
        "eq": _named("equal"),
        "select_n": _select,
    }
)
_MASKS: Mapping[str, Function] = MappingProxyType(
    {
        **_SAME,
        "add": _named("add"),
        "sub": _named("subtract"),
        "and": _named("logical_and"),
        "or": _named("logical_or"),
        "not": _named("logical_not"),
        "eq": _named("equal"),
        "ne": _named("not_equal"),
        "ge": _named("greater_equal"),
        "gt": _named("greater"),
        "le": _named("less_equal"),
        "lt": _named("less"),
        "select_n": _select,
    }
)
#: Reductions of smooth functions: the maximum is that of a softmax, which does not change the result.
REDUCTIONS: Mapping[str, str] = MappingProxyType({"reduce_sum": "sum", "reduce_max": "max"})


def smooth_function(primitive: str, literals: Sequence[Any] = ()) -> Function | None:
    """The function of a smooth primitive; None if it is not smooth.

    Args:
        literals: its literal operands. A maximum with minus infinity is an identity.
    """
    if primitive == "max" and any(value == -math.inf for value in literals):
        return _named("maximum")
    return _SMOOTH.get(primitive)


def mask_function(primitive: str) -> Function | None:
    """The function of a primitive that combines positions and masks; None for any other primitive."""
    return _MASKS.get(primitive)


def is_exponential(primitive: str) -> bool:
    """Whether the primitive is the exponential of a softmax."""
    return primitive in ("exp", "exp2")
