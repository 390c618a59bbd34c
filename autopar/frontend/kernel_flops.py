"""Count the FLOPs of operations without a rule: Pallas kernels and cuDNN's attention.

In: a JAX equation.
Out: `CountedWork`, stored in its node's parameters as plain numbers. A Pallas kernel is counted from its jaxpr, at each
point of its grid: scalars that follow from the point are evaluated, so that loops have their real trip counts and only
the branches taken count. Attention is counted from its shapes. The cost of an operation that is not in `_COUNTERS` is
the bytes of its operands and results.
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

#: Operations outside matrix units, and operations inside by the operands' dtype.
CountedWork = tuple[float, tuple[tuple[str, float], ...]]

#: The parameter of a node that holds its work. It follows from the other parameters, so the fingerprint omits it.
WORK = "work"
#: The parameter that holds the share of a large matmul's rate which a kernel reaches; omitted for the same reason.
EFFICIENCY = "efficiency"

#: The number of grid positions to sample along each axis that the kernel reads.
_SAMPLES = 8


def counted_work(equation: Any) -> CountedWork | None:
    """The work of an equation; None if it cannot be counted, as JAX may change parameters that are not public."""
    counter = _COUNTERS.get(equation.primitive.name)
    try:
        return None if counter is None else counter(equation)
    except (AttributeError, IndexError, KeyError, ValueError):
        return None


def kernel_efficiency(equation: Any) -> float | None:
    """The share of a large matmul's rate that a kernel's matmuls reach; None for an operation whose work is not counted."""
    name = equation.primitive.name
    if name not in _COUNTERS:
        return None
    try:
        return _attention_efficiency(equation) if name in _ATTENTION else _PALLAS_EFFICIENCY
    except (AttributeError, IndexError, KeyError):
        return None


def work_of(jaxpr: Any) -> CountedWork:
    """The work of a program. A loop of unknown trip count counts as one iteration; of several branches the most
    expensive counts."""
    count: Counter[str] = Counter()
    _Counted((), (), count).run(jaxpr, [None] * len(jaxpr.invars))
    return _as_work(count, 1.0)


def scalar_results(equation: Any, values: Sequence[int | None]) -> Sequence[int | None]:
    """The values of an equation's scalar results for these operands; empty or None where they are unknown."""
    return _Counted((), (), Counter())._equation(equation, list(values), 1.0)


def scalars_of(jaxpr: Any, arguments: Sequence[int | None]) -> list[int | None]:
    """The values of a program's scalar results for these arguments; None where a value is unknown."""
    return _Counted((), (), Counter()).run(jaxpr, arguments)


def every_equation(jaxpr: Any, times: float = 1.0) -> Iterator[tuple[Any, float]]:
    """Every equation with the number of its executions; a loop of unknown trip count counts as one iteration."""
    for equation in jaxpr.eqns:
        yield equation, times
        more = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for inner in jax_compat.programs_in(equation):
            yield from every_equation(inner, more)


# -- attention -----------------------------------------------------------------------------------


def _attention(equation: Any, *, scores: int, values: int) -> CountedWork:
    """Two matmuls per pair of a query and a visible key: along the dim of queries and keys (`scores` times) and
    along that of values (`values` times)."""
    params = equation.params
    query, key, value = (variable.aval.shape for variable in equation.invars[:3])
    tokens, heads = (2, 1) if params["layout"] == HEADS_FIRST else (1, 2)
    num_queries, num_keys = query[tokens], key[tokens]
    tables = [v.aval.shape for v in equation.invars[8:10] if len(v.aval.shape) == 4 and math.prod(v.aval.shape)]
    if tables:  # a paged KV cache
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


#: The shares of a large matmul's rate that cuDNN's attention reaches on long sequences, by features of a head; forward: with a
#: causal mask, backward: the same. Measured on an H100 at 64 and 128 features (benchmarks/results/gpu.md); fewer features: in
#: proportion, because the softmax takes the same time for fewer products.
_SHARES = {"fwd": {64: 0.39, 128: 0.6}, "bwd": {64: 0.38, 128: 0.56}}
#: The number of keys at which half of it is reached, and how much faster it is without a mask, whose edge is computed in full; by
#: the figures of FlashAttention-3 (arXiv 2407.08608).
_RAMP = {"fwd": 110, "bwd": 350}
_WITHOUT_MASK = 1 / 0.87
#: The same share for a Pallas kernel: Triton's attention, 395 of 790 TFLOP/s on an H100 by the same figures.
_PALLAS_EFFICIENCY = 0.5


def _attention_efficiency(equation: Any) -> float:
    params, (query, key) = equation.params, (variable.aval.shape for variable in equation.invars[:2])
    direction = "bwd" if "bwd" in equation.primitive.name else "fwd"
    features, keys = query[3], key[2 if params["layout"] == HEADS_FIRST else 1]
    shares = _SHARES[direction]
    share = float(np.interp(features, list(shares), list(shares.values()))) * min(1.0, features / min(shares))
    mask = params.get("mask_type")
    is_masked = "CAUSAL" in str(getattr(mask, "name", mask)) or bool(params.get("sliding_window_length"))
    return share * keys / (keys + _RAMP[direction]) * (1.0 if is_masked else _WITHOUT_MASK)


#: cuDNN attention's code for the layout [batch, heads, tokens, dim] instead of [batch, tokens, heads, dim].
HEADS_FIRST = 1


# -- Pallas kernels ------------------------------------------------------------------------------


def _pallas(equation: Any) -> CountedWork:
    jaxpr, _ = jax_compat.open_jaxpr(equation.params["jaxpr"])
    mapping = equation.params["grid_mapping"]
    sizes = [size if isinstance(size, int) else 1 for size in mapping.grid]
    grid = tuple(
        size for dim, size in enumerate(sizes) if dim not in mapping.vmapped_dims
    )  # as the kernel numbers them
    sampled_axes = {one.params["axis"] for one, _ in every_equation(jaxpr) if one.primitive.name == "program_id"}
    sampled = [_spread(size) if axis in sampled_axes else (0,) for axis, size in enumerate(grid)]
    points = list(itertools.product(*sampled))
    count: Counter[str] = Counter()
    for point in points:
        _Counted(grid, point, count).run(jaxpr, [None] * len(jaxpr.invars))
    return _as_work(count, math.prod(sizes) / max(len(points), 1))


def _spread(size: int) -> Sequence[int]:
    """At most `_SAMPLES` positions, evenly spaced and symmetric, so that work that is linear in the position has the
    right mean."""
    if size <= _SAMPLES:
        return range(size)
    first = [int((part + 0.5) * size / _SAMPLES) for part in range(_SAMPLES // 2)]
    return [*first, *(size - 1 - position for position in reversed(first))]


def _as_work(count: Mapping[str, float], times: float) -> CountedWork:
    inside = tuple(sorted((dtype, times * flops) for dtype, flops in count.items() if dtype))
    return times * count.get("", 0.0), inside


def _quotient(a: int, b: int) -> int:
    """Integer division as on a device: towards zero."""
    return int(a / b) if abs(a) < 1 << 52 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_Scalar = int | None

#: The scalar operations of a kernel that are evaluated.
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
    """Counts a program at one point of a grid, by the dtype of matmul operands; "" for all other operations."""

    def __init__(self, grid: tuple[int, ...], point: tuple[int, ...], count: Counter[str]) -> None:
        self.grid, self.point, self.count = grid, point, count

    def run(self, jaxpr: Any, arguments: Sequence[_Scalar], times: float = 1.0) -> list[_Scalar]:
        """Count a program that runs `times` times. Return the known values of its results."""
        known: dict[Any, int] = {}

        def read(atom: Any) -> _Scalar:
            if not hasattr(atom, "val"):
                return known.get(atom)
            value = atom.val
            return int(value) if getattr(value, "shape", ()) == () and int(value) == value else None

        def record(variables: Sequence[Any], values: Sequence[_Scalar]) -> None:
            for variable, value in zip(variables, values, strict=False):
                if value is not None and getattr(variable.aval, "shape", None) == ():
                    known[variable] = value

        record(jaxpr.invars, arguments)
        for equation in jaxpr.eqns:
            record(equation.outvars, self._equation(equation, [_safely(read, atom) for atom in equation.invars], times))
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
            has_same_results = name != "scan" and len(programs) == 1 and len(results) == len(equation.outvars)
            return results if has_same_results else ()
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
        """Count the branch taken; if it is unknown, the most expensive one."""
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
        initial, constants = values[first:], values[split:first]
        nothing = _Counted(self.grid, self.point, Counter())

        def condition(carry: Sequence[_Scalar]) -> _Scalar:
            return nothing.run(cond, [*values[:split], *carry])[0]

        def body_step(carry: Sequence[_Scalar]) -> list[_Scalar]:
            return nothing.run(body, [*constants, *carry])

        trip_count = _trip_count(initial, condition, body_step)
        if trip_count:
            self.run(body, [*constants, *[None] * len(initial)], times * trip_count)
        return initial if trip_count == 0 else ()


def _safely(read: Callable[[Any], _Scalar], atom: Any) -> _Scalar:
    try:
        return read(atom)
    except (TypeError, ValueError, OverflowError):  # a literal that is not an integer
        return None


def _trip_count(
    initial: Sequence[_Scalar],
    condition: Callable[[Sequence[_Scalar]], _Scalar],
    body_step: Callable[[Sequence[_Scalar]], list[_Scalar]],
) -> int:
    """The trip count of a loop whose scalars advance by equal steps; 1 if it is unknown."""
    more = condition(initial)
    if not more:
        return 1 if more is None else 0
    after = body_step(initial)
    steps = [b - a if a is not None and b is not None else None for a, b in zip(initial, after, strict=True)]
    again = [b - a if a is not None and b is not None else None for a, b in zip(after, body_step(after), strict=True)]
    if steps != again:
        return 1

    def runs(trip_count: int) -> bool:
        carry = [
            a + trip_count * d if a is not None and d is not None else None for a, d in zip(initial, steps, strict=True)
        ]
        return bool(condition(carry))

    most = 1
    while runs(most):
        most *= 2
        if most > 1 << 40:  # the condition does not depend on the advancing scalars
            return 1
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if runs(middle) else (least, middle)
    return most


def flops_of(equation: Any) -> tuple[str, float]:
    """The operations of an equation and the dtype of its matmul operands: two per multiply-add of a matmul, else one
    per element."""
    size = float(sum(math.prod(getattr(var.aval, "shape", ())) for var in equation.outvars))
    if equation.primitive.name != "dot_general":
        return "", size
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    return left.dtype.name, 2.0 * size * math.prod(left.shape[d] for d in contracting)


_FORWARD, _BACKWARD = partial(_attention, scores=1, values=1), partial(_attention, scores=3, values=2)
_ATTENTION = {
    "dot_product_attention_fwd_wrapper": _FORWARD,
    "dot_product_attention_bwd_wrapper": _BACKWARD,
    "dot_product_attention_fp8_fwd_wrapper": _FORWARD,
    "dot_product_attention_fp8_bwd_wrapper": _BACKWARD,
}
_COUNTERS: Mapping[str, Callable[[Any], CountedWork]] = {
    "pallas_call": _pallas,
    **_ATTENTION,
}
