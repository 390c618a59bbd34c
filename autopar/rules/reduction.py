"""Rules of reductions, scans and sorts.

In: `NodeView`. Out: `REDUCTION`, part of the table. A plain reduction may be split along the dims it reduces, which
leaves its result unreduced. Cumulative operations, argmax and top-k may be split along their dim as manual regions, in
which devices exchange totals or candidates. All others need replication of their dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from autopar.rules.factors import Elements, Reduction, Rule, Sent, build_rule, by_position
from autopar.rules.node_view import NodeView, RuleFunction, rule_by_position
from autopar.rules.traits import Traits, with_traits


def reduce(view: NodeView, kind: Reduction) -> Rule:
    """`a b -> a` with b reduced."""
    (shape,), axes = view.operand_shapes, view.params["axes"]
    result = [(d,) for d in range(len(shape)) if d not in axes]
    return build_rule([by_position(shape)], [result], view.operand_shapes, view.result_shapes, reduction=kind)


def _reduce_whole(view: NodeView, parameter: str) -> Rule:
    """A reduction whose partial results no collective combines: the reduced dims need replication.

    The operands of the first operand's shape are reduced; the others are scalar initial values.
    """
    axes = view.params[parameter]
    shape = view.operand_shapes[0]
    result = [(d,) for d in range(len(shape)) if d not in axes]
    return build_rule(
        [by_position(s, axes) if s == shape else [()] * len(s) for s in view.operand_shapes],
        [result] * len(view.result_shapes),
        view.operand_shapes,
        view.result_shapes,
        flops_per_point=float(math.prod(shape[d] for d in axes)),
    )


def _arg(view: NodeView) -> Rule:
    """The position of an extreme: each device sends the value and the position of its own part's extreme."""
    axes = view.params["axes"]
    rank = len(view.operand_shapes[0])
    sent: tuple[Elements, ...] = (("operand", 0), ("result", 0))
    return build_rule(
        [by_position(view.operand_shapes[0])],
        [[(d,) for d in range(rank) if d not in axes]],
        view.operand_shapes,
        view.result_shapes,
        manual=axes,
        sent=[Sent(d, 1, elements) for d in axes for elements in sent],
    )


def _cumulative(view: NodeView) -> Rule:
    """Each part of the dim starts from the total of the parts before it: devices exchange totals."""
    shape, axis = view.operand_shapes[0], view.params["axis"]
    names = by_position(shape)
    return build_rule(
        [names],
        [names],
        view.operand_shapes,
        view.result_shapes,
        manual=[axis],
        sent=[Sent(axis, 1, ("result", 0))],
    )


def _top_k(view: NodeView, parameter: str, flops: Callable[[int], float]) -> Rule:
    """The k largest elements are among the k largest of each part: devices exchange their values and positions.

    On CPUs XLA's partitioner all-gathers the operand if any other dim is split. So all dims are manual.
    """
    shape = view.operand_shapes[0]
    axis = view.params[parameter] % len(shape)
    if any(result[axis] != view.params["k"] for result in view.result_shapes):  # more than k candidates
        return _along(view, parameter, flops)
    return build_rule(
        [by_position(shape)],
        [by_position(result, {axis}) for result in view.result_shapes],
        view.operand_shapes,
        view.result_shapes,
        flops_per_point=flops(shape[axis]) / max(1, shape[axis]),
        manual=range(len(shape)),
        sent=[Sent(axis, view.params["k"], ("result", i)) for i in range(len(view.result_shapes))],
    )


def _along(view: NodeView, parameter: str, flops: Callable[[int], float]) -> Rule:
    """The operation runs along one dim of every operand and result; this dim needs replication."""
    rank = len(view.operand_shapes[0])
    whole = {view.params[parameter] % rank} if rank else set()
    return rule_by_position(
        view,
        whole,
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
    "reduce_xor": partial(_reduce_whole, parameter="axes"),
    **dict.fromkeys(("argmax", "argmin"), _arg),
    "reduce": partial(_reduce_whole, parameter="dimensions"),
    **dict.fromkeys(_CUMULATIVE, _cumulative),
    "sort": partial(_along, parameter="dimension", flops=_sorting),
    "top_k": partial(_top_k, parameter="axis", flops=_sorting),
    "approx_top_k": partial(_top_k, parameter="reduction_dimension", flops=float),
}

REDUCTION_TRAITS = with_traits(
    REDUCTION,
    {
        **dict.fromkeys(_KINDS, Traits(reduces="dims", terms=True)),
        "reduce_xor": Traits(reduces="dims"),
        "reduce_sum": Traits(reduces="dims", terms=True, linear="one"),
        **dict.fromkeys(("argmax", "argmin"), Traits(reduces="position", independent=True)),
        **dict.fromkeys(_CUMULATIVE, Traits(reduces="running")),
        "cumsum": Traits(reduces="running", linear="one"),
        "sort": Traits(library=True),
        **dict.fromkeys(("top_k", "approx_top_k"), Traits(library=True, independent=True)),
    },
)
