"""Rules of reductions, scans and sorts.

In: `NodeView`. Out: `REDUCTION`, part of the table. A plain reduction may be split along the dims
it reduces, which leaves its result unreduced; the others need the dim they work along whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial

from autopar.rules.factors import DimNames, Reduction, Rule, build_rule
from autopar.rules.registry import NodeView, RuleFunction


def _named(shape: tuple[int, ...], whole: Collection[int]) -> DimNames:
    """Each dim named by its position, except those that need replication."""
    return [() if d in whole else (d,) for d in range(len(shape))]


def reduce(view: NodeView, kind: Reduction) -> Rule:
    """`a b -> a` with b reduced."""
    (shape,), axes = view.operand_shapes, view.params["axes"]
    result = [(d,) for d in range(len(shape)) if d not in axes]
    return build_rule([_named(shape, ())], [result], view.operand_shapes, view.result_shapes, reduction=kind)


def _reduce_whole(view: NodeView, parameter: str) -> Rule:
    """A reduction whose parts nothing we have can combine: the reduced dims need replication.

    The first operands are reduced alike; the rest are scalars to begin from.
    """
    axes = view.params[parameter]
    shape = view.operand_shapes[0]
    result = [(d,) for d in range(len(shape)) if d not in axes]
    return build_rule(
        [_named(s, axes) if s == shape else [()] * len(s) for s in view.operand_shapes],
        [result] * len(view.result_shapes),
        view.operand_shapes,
        view.result_shapes,
        flops_per_point=float(math.prod(shape[d] for d in axes)),
    )


def _along(view: NodeView, parameter: str, flops: Callable[[int], float]) -> Rule:
    """One dim is worked along, in every operand and result, and needs replication."""
    rank = len(view.operand_shapes[0])
    whole = {view.params[parameter] % rank} if rank else set()
    return build_rule(
        [_named(shape, whole) for shape in view.operand_shapes],
        [_named(shape, whole) for shape in view.result_shapes],
        view.operand_shapes,
        view.result_shapes,
        flops_per_point=sum(flops(view.operand_shapes[0][d]) for d in whole),
    )


def _sorting(size: int) -> float:
    return size * max(1.0, math.log2(max(1, size)))


_KINDS: dict[str, Reduction] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
REDUCTION: dict[str, RuleFunction] = {
    **{name: partial(reduce, kind=kind) for name, kind in _KINDS.items()},
    **{name: partial(_reduce_whole, parameter="axes") for name in ("argmax", "argmin", "reduce_xor")},
    "reduce": partial(_reduce_whole, parameter="dimensions"),
    **{name: partial(_along, parameter="axis", flops=float) for name in _CUMULATIVE},
    "sort": partial(_along, parameter="dimension", flops=_sorting),
    "top_k": partial(_along, parameter="axis", flops=_sorting),
    "approx_top_k": partial(_along, parameter="reduction_dimension", flops=float),
}
