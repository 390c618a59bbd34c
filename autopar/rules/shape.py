"""Rules of primitives that move elements by position, not by value.

In: `NodeView`. Out: `SHAPE`, part of the table. Transposes, broadcasts, and reshapes that add or remove dims of size 1
are pointwise. A dim that is sliced, concatenated, padded or reversed needs replication; the other dims are free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise

from autopar.rules.factors import DimNames, Name, Rule, build_rule
from autopar.rules.node_view import NodeView, RuleFunction
from autopar.rules.traits import Traits, with_traits


def _moves(
    view: NodeView,
    operands: Sequence[DimNames],
    results: Sequence[DimNames],
    *,
    sizes: dict[Name, int] | None = None,
    pointwise: bool = False,
    manual: Collection[int] = (),
) -> Rule:
    return build_rule(
        operands,
        results,
        view.operand_shapes,
        view.result_shapes,
        sizes=sizes,
        pointwise=pointwise,
        flops_per_point=0.0,
        manual=manual,
    )


def _broadcast_in_dim(view: NodeView) -> Rule:
    """`broadcast_dimensions` places the operand's dims; the other dims of the result are new loops."""
    places = view.params["broadcast_dimensions"]
    operands: list[DimNames] = [[(d,) for d in places]]
    operands += [[()] * len(shape) for shape in view.operand_shapes[1:]]
    return _moves(view, operands, [[(d,) for d in range(len(view.result_shapes[0]))]], pointwise=True)


def _transpose(view: NodeView) -> Rule:
    order = view.params["permutation"]
    return _moves(view, [[(d,) for d in range(len(order))]], [[(d,) for d in order]], pointwise=True)


def _squeeze(view: NodeView) -> Rule:
    rank = len(view.operand_shapes[0])
    gone = {d % rank for d in view.params["dimensions"]}
    operand = [(d,) for d in range(rank)]
    return _moves(view, [operand], [[(d,) for d in range(rank) if d not in gone]], pointwise=True)


def _reshape(view: NodeView) -> Rule:
    """Split or merge dims by the factors common to both shapes.

    Gradients of grouped convolutions have `dimensions`, which transposes the operand first.
    """
    shape = view.operand_shapes[0]
    order = view.params.get("dimensions") or range(len(shape))
    before = tuple(shape[d] for d in order)
    moved, result, sizes = common_factors(before, view.result_shapes[0])
    operand: list[tuple[Name, ...]] = [()] * len(shape)
    for d, names in zip(order, moved, strict=True):
        operand[d] = names
    kept = [size for size in before if size != 1] == [size for size in view.result_shapes[0] if size != 1]
    return _moves(
        view,
        [operand],
        [result],
        sizes={**sizes},
        pointwise=kept and list(order) == sorted(order),
    )


def common_factors(
    before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], dict[int, int]]:
    """Find the factors that make up the dims on both sides of a reshape.

    A dim covers a range of strides. Where the strides of both shapes, merged into one sequence, divide each other, the
    ranges between them are the factors, named by their stride. Elsewhere the dims need replication.

    Returns: the factors' names per dim before the reshape, those per dim after it, and the factors' sizes.

    >>> common_factors((6, 5), (2, 3, 5))
    ([(15, 5), (1,)], [(15,), (5,), (1,)], {15: 2, 5: 3, 1: 5})
    """
    if 0 in before or 0 in after:
        return [()] * len(before), [()] * len(after), {}
    sides = _spans(before), _spans(after)
    meets = sorted({1, *({top for _, top in sides[0]} & {top for _, top in sides[1]})}, reverse=True)
    sizes: dict[int, int] = {}
    for high, low in pairwise(meets):  # each range between common strides is its own reshape
        cuts = sorted({cut for side in sides for span in side for cut in span if low <= cut <= high}, reverse=True)
        steps = list(pairwise(cuts))
        if all(upper % lower == 0 for upper, lower in steps):
            sizes |= {lower: upper // lower for upper, lower in steps}

    def names(side: list[tuple[int, int]]) -> list[tuple[int, ...]]:
        return [tuple(stride for stride in sizes if low <= stride < high) for low, high in side]

    return names(sides[0]), names(sides[1]), sizes


def _spans(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Per dim its stride, and its stride times its size."""
    spans: list[tuple[int, int]] = []
    stride = 1
    for size in reversed(shape):
        spans.insert(0, (stride, stride * size))
        stride *= size
    return spans


def _untouched_dims(view: NodeView, touched: Collection[int]) -> Rule:
    """All tensors of full rank share the untouched dims; scalars (a padding value, a start) have none."""
    rank = len(view.result_shapes[0])

    def names(shape: tuple[int, ...]) -> DimNames:
        return [(d,) if len(shape) == rank and d not in touched else () for d in range(len(shape))]

    return _moves(view, [names(s) for s in view.operand_shapes], [names(s) for s in view.result_shapes])


def _one_dim(view: NodeView, parameter: str) -> Rule:
    return _untouched_dims(view, {view.params[parameter]})


def _pad(view: NodeView) -> Rule:
    return _untouched_dims(view, {d for d, amounts in enumerate(view.params["padding_config"]) if any(amounts)})


def _rev(view: NodeView) -> Rule:
    return _untouched_dims(view, set(view.params["dimensions"]))


def _slice(view: NodeView) -> Rule:
    """A dim is free if the result has it at full length."""
    pairs = zip(view.operand_shapes[0], view.result_shapes[0], strict=True)
    return _untouched_dims(view, {d for d, (a, b) in enumerate(pairs) if a != b})


def _dynamic_slice(view: NodeView) -> Rule:
    """A sliced dim may be split: each device contributes its part of the slice, and zeros elsewhere."""
    shape, result = view.operand_shapes[0], view.result_shapes[0]
    cut = [d for d, (a, b) in enumerate(zip(shape, result, strict=True)) if a != b]
    starts: list[DimNames] = [[()] * len(s) for s in view.operand_shapes[1:]]
    kept: DimNames = [() if d in cut else (d,) for d in range(len(shape))]
    return _moves(view, [[(d,) for d in range(len(shape))], *starts], [kept], manual=cut)


def _dynamic_update_slice(view: NodeView) -> Rule:
    """A dim into which a window is written may be split: each device writes the elements that fall on its part. XLA's
    partitioner can split such a dim for a window of one element, but it then drops a write beyond the end, which one
    device moves to the last position."""
    shape, update = view.operand_shapes[:2]
    cut = [d for d, (a, b) in enumerate(zip(shape, update, strict=True)) if a != b]
    whole: DimNames = [(d,) for d in range(len(shape))]
    starts: list[DimNames] = [[()] * len(s) for s in view.operand_shapes[2:]]
    kept: DimNames = [() if d in cut else (d,) for d in range(len(shape))]
    return _moves(view, [whole, kept, *starts], [whole], manual=cut)


def _stack(view: NodeView) -> Rule:
    axis, rank = view.params["axis"], len(view.result_shapes[0])
    operand = [(d,) for d in range(rank) if d != axis]
    result = [() if d == axis else (d,) for d in range(rank)]
    return _moves(view, [operand] * len(view.operand_shapes), [result])


def _unstack(view: NodeView) -> Rule:
    axis, rank = view.params["axis"], len(view.operand_shapes[0])
    operand = [() if d == axis else (d,) for d in range(rank)]
    result = [(d,) for d in range(rank) if d != axis]
    return _moves(view, [operand], [result] * len(view.result_shapes))


def _tile(view: NodeView) -> Rule:
    """Each repeated dim has a new major loop over the repetitions."""
    shape, reps = view.operand_shapes[0], view.params["reps"]
    sizes: dict[Name, int] = {f"r{d}": rep for d, rep in enumerate(reps) if rep > 1}
    sizes |= {d: size for d, size in enumerate(shape) if size > 1}
    return _moves(view, [[(d,) for d in range(len(shape))]], [[(f"r{d}", d) for d in range(len(shape))]], sizes=sizes)


SHAPE: dict[str, RuleFunction] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "concatenate": partial(_one_dim, parameter="dimension"),
    "split": partial(_one_dim, parameter="axis"),
    "pad": _pad,
    "rev": _rev,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
}

SHAPE_TRAITS = with_traits(
    SHAPE,
    {
        "reshape": Traits(view=True, reshapes=True, linear="one", one_to_one=True),
        "squeeze": Traits(view=True, linear="one", one_to_one=True),
        "transpose": Traits(moves="fixed", linear="one", one_to_one=True, permutes=True),
        "broadcast_in_dim": Traits(moves="fixed", linear="one", uniform=True),
        **dict.fromkeys(("slice", "rev"), Traits(moves="fixed", linear="one")),
        **dict.fromkeys(("split", "tile", "unstack"), Traits(linear="one")),
        **dict.fromkeys(("concatenate", "pad"), Traits(moves="fixed", linear="all")),
        "stack": Traits(linear="all"),
        "dynamic_slice": Traits(moves="indexed", linear="first"),
        "dynamic_update_slice": Traits(in_place="slice", linear="written"),
    },
)
