"""Rules of gather and scatter: embedding look-ups, `take_along_axis`, `x.at[i].set(y)`.

In: `NodeView`. Out: `INDEXING`, part of the table. JAX keeps the index vector in the last dim of the indices; this dim
needs replication. So does each dim of which slices longer than 1 are taken.

XLA's partitioner follows these rules, as seen in compiled GPU programs. It masks a look-up in a table split by rows and
sums the results, by a reduce-scatter where the result is split. A scatter into such a table needs no communication. The
trace separates a gather from its fill for indices out of bounds (`jax_interop.compat.called`), because XLA makes no
reduce-scatter of a sum that a mask follows.

A gather or scatter with one index differs: XLA's GPU compiler turns it into a dynamic slice, or an update of one,
before it partitions, and then all-gathers the operand along every split dim that is sliced. Such a dim needs
replication.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial

from autopar.rules.factors import Name, Reduction, Rule, build_rule
from autopar.rules.node_view import NodeView, RuleFunction
from autopar.rules.traits import Traits, with_traits

Names = list[tuple[Name, ...]]


def gather(view: NodeView) -> Rule:
    """`v f, b s . -> b s f` with v reduced: batch dims of the indices and whole dims of the slices pass through. A dim
    of which each index selects one element may be split; each device looks up the elements in its part."""
    operand_shape, index_shape = view.operand_shapes[:2]
    numbers = view.params["dimension_numbers"]
    sizes = view.params["slice_sizes"]
    indexed, collapsed = set(numbers["start_index_map"]), set(numbers["collapsed_slice_dims"])
    whole = {d for d, size in enumerate(operand_shape) if sizes[d] == size} - indexed
    operand, indices, result = _connect(
        operand_shape,
        index_shape,
        view.result_shapes[0],
        free=whole | _searched(index_shape, indexed & collapsed),
        skipped=collapsed | {*numbers["operand_batching_dims"]},
        window_dims=numbers["offset_dims"],
        batching=list(zip(numbers["operand_batching_dims"], numbers["start_indices_batching_dims"], strict=True)),
    )
    return build_rule([operand, indices], [result], view.operand_shapes, view.result_shapes, flops_per_point=0.0)


def scatter(view: NodeView, *, combines: Reduction | None) -> Rule:
    """`v f, b s ., b s f -> v f`: the reverse of a gather. A dim of which each index selects one element may be split;
    each device applies the updates that fall on its part.

    If updates are combined, the loops over them are reductions: each device combines its share of the updates, and the
    operand is counted once (XLA replaces it by the identity on all devices but the first). The shares must be equal:
    XLA pads the indices with zeros, and on a mesh of several axes the padding updates the first element (jax
    0.12.0.1). The parts of a batch of scatters must be equal too: XLA cannot pad them and aborts the process.

    Args:
        combines: the reduction that combines updates with the operand; None where their order matters.
    """
    operand_shape, index_shape, update_shape = view.operand_shapes
    numbers = view.params["dimension_numbers"]
    indexed, inserted = set(numbers["scatter_dims_to_operand_dims"]), set(numbers["inserted_window_dims"])
    skipped = inserted | {*numbers["operand_batching_dims"]}
    searched = _searched(index_shape, indexed & inserted)
    window_dims = numbers["update_window_dims"]
    kept = [d for d in range(len(operand_shape)) if d not in skipped]
    whole = {d for d, u in zip(kept, window_dims, strict=True) if operand_shape[d] == update_shape[u]} - indexed
    operand, indices, updates = _connect(
        operand_shape,
        index_shape,
        update_shape,
        free=whole | searched,
        skipped=skipped,
        window_dims=window_dims,
        batching=list(zip(numbers["operand_batching_dims"], numbers["scatter_indices_batching_dims"], strict=True)),
    )
    in_operand = {name for names in operand for name in names}
    if combines is None:  # updates of one element must keep their order
        indices, updates = ([n if set(n) <= in_operand else () for n in term] for term in (indices, updates))
    loops = {name for term in (indices, updates) for names in term for name in names}
    loops -= in_operand - {name for names in indices for name in names}  # also loops over a batch of scatters
    # One operation per update: the loops over the indexed dims only find its position.
    places = math.prod(max(1, operand_shape[d]) for d in searched)
    return build_rule(
        [operand, indices, updates],
        [operand],
        view.operand_shapes,
        view.result_shapes,
        reduction=combines or "sum",
        even=loops,
        flops_per_point=0.0 if combines is None else 1.0 / places,
    )


def _searched(index_shape: tuple[int, ...], indexed: set[int]) -> set[int]:
    """The `indexed` dims that may be split, because each device looks up the elements in its part; none if there is one
    index only."""
    return indexed if math.prod(index_shape[:-1]) > 1 else set()


def _connect(
    operand_shape: tuple[int, ...],
    index_shape: tuple[int, ...],
    slices_shape: tuple[int, ...],
    *,
    free: Collection[int],
    skipped: Collection[int],
    window_dims: tuple[int, ...],
    batching: list[tuple[int, int]],
) -> tuple[Names, Names, Names]:
    """Name the dims of the operand, the indices and the slices (a gather's result or a scatter's updates).

    Args:
        free: operand dims that may be split: every slice has the whole dim or one element of it.
        skipped: operand dims that the slices lack.
        window_dims: dims of the slices that run along the operand's other dims, in order. The rest run along the batch
            dims of the indices, in order.
        batching: pairs (operand dim, indices dim) that run together.
    """
    operand: Names = [(f"o{d}",) if d in free else () for d in range(len(operand_shape))]
    indices: Names = [*((f"b{d}",) for d in range(len(index_shape) - 1)), ()]
    for d, e in batching:
        operand[d] = indices[e]
    slices: Names = [()] * len(slices_shape)
    kept = [d for d in range(len(operand_shape)) if d not in skipped]
    for s, d in zip(window_dims, kept, strict=True):
        slices[s] = operand[d]
    rest = [s for s in range(len(slices_shape)) if s not in window_dims]
    for s, names in zip(rest, indices[:-1], strict=True):
        slices[s] = names
    return operand, indices, slices


#: Scatters whose partial results XLA's partitioner combines. For a `scatter-sub` it all-gathers the operands instead.
_COMBINING: dict[str, Reduction] = {
    "scatter-add": "sum",
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}

INDEXING: dict[str, RuleFunction] = {
    "gather": gather,
    **{name: partial(scatter, combines=kind) for name, kind in _COMBINING.items()},
    **{name: partial(scatter, combines=None) for name in ("scatter", "scatter-sub")},
}

INDEXING_TRAITS = with_traits(
    INDEXING,
    {
        "gather": Traits(moves="indexed", linear="first"),
        **dict.fromkeys(("scatter", "scatter-sub"), Traits(in_place="scatter")),
        **dict.fromkeys(_COMBINING, Traits(in_place="scatter", terms=True)),
        "scatter-add": Traits(in_place="scatter", terms=True, linear="written"),
    },
)
