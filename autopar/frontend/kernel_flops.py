"""The arithmetic of operations that no rule describes, where it can be counted: Pallas kernels and cuDNN's attention.

In: one of JAX's equations. Out: `CountedWork`, kept among its node's parameters as plain numbers. A Pallas kernel is
counted from its jaxpr, once for each point of its grid: scalars that follow from the point are computed, so that loops
run as often as they will and only the branches that are taken count. Attention is counted by its shapes. An operation
that is not in `_COUNTERS` is priced by the bytes of its operands and results alone.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from autopar.jax_interop import compat as jax_compat

#: Operations outside matrix units; and inside, by the operands' dtype.
CountedWork = tuple[float, tuple[tuple[str, float], ...]]

#: The parameter of a node that holds it. It follows from the others, so it is no part of what tells programs apart.
WORK = "work"

#: Positions of the grid that are looked at along each axis that the kernel asks for.
_SAMPLES = 8


def counted_work(equation: Any) -> CountedWork | None:
    """What an equation computes; None where it cannot be counted: JAX may change parameters that are not public."""
    counter = _COUNTERS.get(equation.primitive.name)
    try:
        return None if counter is None else counter(equation)
    except (AttributeError, IndexError, KeyError, ValueError):
        return None


def work_of(jaxpr: Any) -> CountedWork:
    """What a program computes. A loop whose length is not known counts as one trip, of several branches the dearest."""
    count: Counter[str] = Counter()
    _Counted((), (), count).run(jaxpr, [None] * len(jaxpr.invars))
    return _as_work(count, 1.0)


def every_equation(jaxpr: Any, times: float = 1.0) -> Iterator[tuple[Any, float]]:
    """Every equation, with how often it runs; a loop of unknown length counts as one trip."""
    for equation in jaxpr.eqns:
        yield equation, times
        more = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for inner in jax_compat.programs_in(equation):
            yield from every_equation(inner, more)


# -- attention -----------------------------------------------------------------------------------


def _attention(equation: Any, *, scores: int, values: int) -> CountedWork:
    """Products along the dim of queries and keys (`scores`), and along that of values, for each pair of a query and a key
    that it may see."""
    params = equation.params
    query, key, value = (variable.aval.shape for variable in equation.invars[:3])
    tokens, heads = (2, 1) if params["layout"] == _HEADS_FIRST else (1, 2)
    num_queries, num_keys = query[tokens], key[tokens]
    tables = [v.aval.shape for v in equation.invars[8:10] if len(v.aval.shape) == 4 and math.prod(v.aval.shape)]
    if tables:  # keys and values lie in pages
        num_keys *= tables[0][2]
    mask = params.get("mask_type")
    is_causal = "CAUSAL" in str(getattr(mask, "name", mask)) or params.get("use_causal_mask", False)
    window = params.get("sliding_window_length") or num_keys
    if is_causal or window < num_keys:
        pairs = sum(min(i + 1, window, num_keys) for i in range(num_queries))
    else:
        pairs = num_queries * num_keys
    flops = 2.0 * query[0] * query[heads] * pairs * (scores * query[3] + values * value[3])
    return 0.0, ((equation.invars[0].aval.dtype.name, flops),)


#: How cuDNN's attention says that a tensor is [batch, heads, tokens, dim], and not [batch, tokens, heads, dim].
_HEADS_FIRST = 1


# -- Pallas kernels ------------------------------------------------------------------------------


def _pallas(equation: Any) -> CountedWork:
    jaxpr, _ = jax_compat.open_jaxpr(equation.params["jaxpr"])
    grid = tuple(size if isinstance(size, int) else 1 for size in equation.params["grid_mapping"].grid)
    asked = {one.params["axis"] for one, _ in every_equation(jaxpr) if one.primitive.name == "program_id"}
    sampled = [_spread(size) if axis in asked else (0,) for axis, size in enumerate(grid)]
    points = list(itertools.product(*sampled))
    count: Counter[str] = Counter()
    for point in points:
        _Counted(grid, point, count).run(jaxpr, [None] * len(jaxpr.invars))
    return _as_work(count, math.prod(grid) / max(len(points), 1))


def _spread(size: int) -> Sequence[int]:
    """So many positions at the most, evenly, and as far from the start as from the end: what grows with them is right in the
    mean."""
    if size <= _SAMPLES:
        return range(size)
    first = [int((part + 0.5) * size / _SAMPLES) for part in range(_SAMPLES // 2)]
    return [*first, *(size - 1 - position for position in reversed(first))]


def _as_work(count: Mapping[str, float], times: float) -> CountedWork:
    inside = tuple(sorted((dtype, times * flops) for dtype, flops in count.items() if dtype))
    return times * count.get("", 0.0), inside


def _quotient(a: int, b: int) -> int:
    """As integers are divided on a device: towards zero."""
    return int(a / b) if abs(a) < 1 << 52 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_Scalar = int | None

#: What is computed of scalars of a kernel.
_SCALARS: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
    "min": min,
    "div": _quotient,
    "rem": lambda a, b: a - b * _quotient(a, b),
    "clamp": lambda low, a, high: max(low, min(a, high)),
    "shift_left": operator.lshift,
    "shift_right_arithmetic": operator.rshift,
    "sign": lambda a: (a > 0) - (a < 0),
    "neg": lambda a: -a,
    "lt": operator.lt,
    "lt_to": operator.lt,
    "le": operator.le,
    "le_to": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "not": lambda a: not a,
    "select_n": lambda which, *cases: cases[int(which)],
    **dict.fromkeys(
        ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy", "stop_gradient"), lambda a: a
    ),
}


class _Counted:
    """Counts a program at one point of a grid, by dtype of what matrix units multiply; "" for all else."""

    def __init__(self, grid: tuple[int, ...], point: tuple[int, ...], count: Counter[str]) -> None:
        self.grid, self.point, self.count = grid, point, count

    def run(self, jaxpr: Any, arguments: Sequence[_Scalar], times: float = 1.0) -> list[_Scalar]:
        """Count a program that runs so many times; what is known of its results."""
        known: dict[Any, int] = {}

        def read(atom: Any) -> _Scalar:
            if not hasattr(atom, "val"):
                return known.get(atom)
            value = atom.val
            return int(value) if getattr(value, "shape", ()) == () and int(value) == value else None

        def told(variables: Sequence[Any], values: Sequence[_Scalar]) -> None:
            for variable, value in zip(variables, values, strict=False):
                if value is not None and getattr(variable.aval, "shape", None) == ():
                    known[variable] = value

        told(jaxpr.invars, arguments)
        for equation in jaxpr.eqns:
            told(equation.outvars, self._equation(equation, [_safely(read, atom) for atom in equation.invars], times))
        return [_safely(read, atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, values: list[_Scalar], times: float) -> Sequence[_Scalar]:
        name = equation.primitive.name
        if name == "program_id" and self.grid:
            return [self.point[equation.params["axis"]]]
        if name == "num_programs" and self.grid:
            return [self.grid[equation.params["axis"]]]
        if name == "while":
            return self._while(equation, values, times)
        if name == "cond":
            return self._cond(equation, values, times)
        programs = list(jax_compat.programs_in(equation))
        if programs:
            each = times * equation.params.get("length", 1) if name == "scan" else times
            results: Sequence[_Scalar] = ()
            for program in programs:
                whole = name != "scan" and len(program.invars) == len(values)
                results = self.run(program, values if whole else [None] * len(program.invars), each)
            alike = name != "scan" and len(programs) == 1 and len(results) == len(equation.outvars)
            return results if alike else ()
        result = equation.outvars[0].aval if equation.outvars else None
        is_whole = getattr(result, "shape", None) == () and getattr(result, "dtype", np.dtype(float)).kind in "iub"
        if name in _SCALARS and values and None not in values and is_whole:
            try:
                return [int(_SCALARS[name](*values))]
            except (ArithmeticError, ValueError, IndexError):
                return ()
        dtype, flops = flops_of(equation)
        self.count[dtype] += times * flops  # type: ignore[assignment]
        return ()

    def _cond(self, equation: Any, values: list[_Scalar], times: float) -> Sequence[_Scalar]:
        """The branch that is taken; the dearest, where that is not known."""
        branches = [jax_compat.open_jaxpr(branch)[0] for branch in equation.params["branches"]]
        if values[0] is not None:
            return self.run(branches[min(max(values[0], 0), len(branches) - 1)], values[1:], times)
        counts: list[Counter[str]] = []
        for branch in branches:
            counts.append(Counter())
            _Counted(self.grid, self.point, counts[-1]).run(branch, values[1:], times)
        self.count.update(max(counts, key=lambda count: sum(count.values())))
        return ()

    def _while(self, equation: Any, values: list[_Scalar], times: float) -> Sequence[_Scalar]:
        params = equation.params
        split, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond, body = (jax_compat.open_jaxpr(params[key])[0] for key in ("cond_jaxpr", "body_jaxpr"))
        begun, constants = values[first:], values[split:first]
        nothing = _Counted(self.grid, self.point, Counter())

        def goes_on(carry: Sequence[_Scalar]) -> _Scalar:
            return nothing.run(cond, [*values[:split], *carry])[0]

        def one_more(carry: Sequence[_Scalar]) -> list[_Scalar]:
            return nothing.run(body, [*constants, *carry])

        trips = _trips(begun, goes_on, one_more)
        if trips:
            self.run(body, [*constants, *[None] * len(begun)], times * trips)
        return begun if trips == 0 else ()


def _safely(read: Callable[[Any], _Scalar], atom: Any) -> _Scalar:
    try:
        return read(atom)
    except (TypeError, ValueError, OverflowError):  # a literal that is no whole number
        return None


def _trips(
    begun: Sequence[_Scalar],
    goes_on: Callable[[Sequence[_Scalar]], _Scalar],
    one_more: Callable[[Sequence[_Scalar]], list[_Scalar]],
) -> int:
    """How often a loop runs whose scalars advance by equal steps; 1 where that is not known."""
    more = goes_on(begun)
    if not more:
        return 1 if more is None else 0
    after = one_more(begun)
    steps = [b - a if a is not None and b is not None else None for a, b in zip(begun, after, strict=True)]
    again = [b - a if a is not None and b is not None else None for a, b in zip(after, one_more(after), strict=True)]
    if steps != again:
        return 1

    def runs(trips: int) -> bool:
        carry = [a + trips * d if a is not None and d is not None else None for a, d in zip(begun, steps, strict=True)]
        return bool(goes_on(carry))

    most = 1
    while runs(most):
        most *= 2
        if most > 1 << 40:  # it does not depend on what advances
            return 1
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if runs(middle) else (least, middle)
    return most


def flops_of(equation: Any) -> tuple[str, float]:
    """Operations: of a matrix product, two for each point, by the dtype of its operands; of anything else, one for each
    element."""
    size = float(sum(math.prod(getattr(var.aval, "shape", ())) for var in equation.outvars))
    if equation.primitive.name != "dot_general":
        return "", size
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    return left.dtype.name, 2.0 * size * math.prod(left.shape[d] for d in contracting)


_FORWARD, _BACKWARD = partial(_attention, scores=1, values=1), partial(_attention, scores=3, values=2)
_COUNTERS: Mapping[str, Callable[[Any], CountedWork]] = {
    "pallas_call": _pallas,
    "dot_product_attention_fwd_wrapper": _FORWARD,
    "dot_product_attention_bwd_wrapper": _BACKWARD,
    "dot_product_attention_fp8_fwd_wrapper": _FORWARD,
    "dot_product_attention_fp8_bwd_wrapper": _BACKWARD,
}
