"""Represent sharding rules: each dim of a node's operands and results is named by factors, as in an einsum.

In: nothing. Out: `Rule`, which the functions in `table` build. The idea and its terms are those of Shardy's op sharding
rules: https://openxla.org/shardy/sdy_op_rules
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.rules.halo_window import Halo, Window

#: How the parts of a split reduction combine.
Reduction = Literal["sum", "max", "min", "prod", "and", "or"]

#: Per dim of one tensor, its factors, major first. An empty tuple is a dim that needs replication: no axis splits it.
DimFactors = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of a node.

    Args:
        size: the number of iterations.
        reduction: None for a pass-through factor (a loop over result elements); otherwise the operation that combines
            the parts when the loop is split, which leaves the result unreduced.
        even: whether it may only be split into equal parts, because XLA's padding would change the result.
    """

    size: int
    reduction: Reduction | None = None
    even: bool = False


#: The tensor whose elements are sent: operand or result *i*.
Elements = tuple[Literal["operand", "result"], int]


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-gather inside a node whose factor is split: each device sends all others what it found in its part.

    Args:
        factor: the loop.
        shape, dims: the operand; its dim along the factor shrinks from one device's part to the elements sent.
        most: the number of elements of that dim that a device sends, unless its part is shorter.
        elements: the tensor whose dtype they have.
    """

    factor: int
    shape: tuple[int, ...]
    dims: DimFactors
    most: int
    elements: Elements


@dataclass(frozen=True, slots=True)
class ContextLoop:
    """The loop over the tokens of queries and of keys of an attention. Where it is split, devices exchange keys and values by a method
    of context parallelism.

    Args:
        factor: the loop.
        size: the number of tokens.
        is_causal: whether a query sees no later key. Then devices compute chunks in zigzag order, two each.
        is_backward: whether the node computes the gradients.
    """

    factor: int
    size: int
    is_causal: bool
    is_backward: bool

    def local(self, parts: int) -> bool:
        """Whether it can be split into this number of parts."""
        return self.size % (parts * (2 if self.is_causal else 1)) == 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How one node may be split.

    Args:
        factors: the loops.
        operands: the factors of each dim of each operand (literals: `()`).
        results: the factors of each dim of each result.
        pointwise: whether each result element depends on at most one element of each operand along every factor. Such a
            node may join its neighbours' group.
        flops_per_point: floating-point operations per point of the iteration space of all factors.
        matrix_flops_per_point: further operations, on matrix units, by the dtype of their operands. For a primitive
            that is one matmul (`Traits.contraction`), `flops_per_point` are on matrix units too.
        matrix_efficiency: the share of a large matmul's rate that these reach.
        pinned: factors that the program itself splits, with their mesh axes (none: the factor stays whole).
        manual: factors that XLA's partitioner does not split, or not well. Where one of them is split, each device runs
            its own part of the node (`runtime/manual/table.py`), and the axes must divide all split dims.
        halos: dims of operands that the loop reads beyond its own part. They are split as the loop is; their sizes may
            differ from the factor's.
        exchanges: the node's all-gathers, in addition to the halos.
        context: the loop over tokens, if the node is an attention whose tokens may be split.
        sums: by result, the factors of other results that it is a sum over: where one is split, each device has one term.
            Empty if there are none.
        stored: intermediate tensors of the first operand's dtype that XLA writes to memory and reads again, by the
            factors they span.
    """

    factors: tuple[Factor, ...]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]
    pointwise: bool = False
    flops_per_point: float = 1.0
    matrix_flops_per_point: tuple[tuple[str, float], ...] = ()
    matrix_efficiency: float = 1.0
    pinned: tuple[tuple[int, tuple[str, ...]], ...] = ()
    manual: frozenset[int] = frozenset()
    halos: tuple[Halo, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    context: ContextLoop | None = None
    sums: tuple[tuple[int, ...], ...] = ()
    stored: tuple[tuple[int, ...], ...] = ()


#: The name of a factor during the construction of a rule.
Name = str | int

#: Per dim of one tensor, the names of its factors, major first; `()` for a dim that needs replication.
DimNames = Sequence[tuple[Name, ...]]


def by_position(shape: tuple[int, ...], whole: Collection[int] = ()) -> DimNames:
    """Name each dim by its position, except the `whole` dims, which need replication."""
    return [() if d in whole else (d,) for d in range(len(shape))]


@dataclass(frozen=True, slots=True)
class Sent:
    """An `Exchange` of the first operand before its rule is built, by the factor's name."""

    name: Name
    most: int
    elements: Elements


def build_rule(
    operands: Sequence[DimNames],
    results: Sequence[DimNames],
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    *,
    sizes: Mapping[Name, int] | None = None,
    reduction: Reduction = "sum",
    even: Collection[Name] = (),
    pointwise: bool = False,
    flops_per_point: float = 1.0,
    matrix_flops_per_point: tuple[tuple[str, float], ...] = (),
    matrix_efficiency: float = 1.0,
    manual: Collection[Name] = (),
    windows: Mapping[tuple[int, int], Window] | None = None,
    sent: Sequence[Sent] = (),
    sums: Sequence[Sequence[Name]] = (),
    stored: Sequence[Sequence[Name]] = (),
) -> Rule:
    """Build a rule from the names of each dim's factors.

    A factor that no result has is a reduction, unless an entry of `sent` along it completes the results. Dims and
    factors of size 1 (or 0) have no factor, whatever their names. A factor has the size of a dim that consists of it
    alone; `sizes` gives the sizes of the others. A dim in `windows`, by operand and position, is read in windows by its
    factor's loop, so its size may differ from the loop's.

    >>> rule = build_rule([[("a", "b")]], [[("a",), ("b",)]], [(6,)], [(2, 3)])
    >>> [f.size for f in rule.factors], rule.operands, rule.results
    ([2, 3], (((0, 1),),), (((0,), (1,)),))
    """
    terms, shapes = [*operands, *results], [*operand_shapes, *result_shapes]
    assert len(operands) == len(operand_shapes) and len(terms) == len(shapes), f"{terms} for tensors {shapes}"
    windows = windows or {}
    known = _factor_sizes(terms, shapes, dict(sizes or {}), windows)
    index = {name: i for i, name in enumerate(known)}

    def dims(t: int, term: DimNames, shape: tuple[int, ...]) -> DimFactors:
        found: list[tuple[int, ...]] = []
        for d, (names, size) in enumerate(zip(term, shape, strict=True)):
            found.append(tuple(index[n] for n in names if n in index) if size > 1 else ())
            product = math.prod(known[n] for n in names if n in index)
            fits = not found[-1] or product == size or (t, d) in windows
            assert fits, f"factors {names} multiply to {product}, not {size}"
        return tuple(found)

    complete = {name for term in results for names in term for name in names} | {one.name for one in sent}
    named = [dims(t, term, shape) for t, (term, shape) in enumerate(zip(terms, shapes, strict=True))]
    return Rule(
        factors=tuple(Factor(size, None if n in complete else reduction, n in even) for n, size in known.items()),
        operands=tuple(named[: len(operands)]),
        results=tuple(named[len(operands) :]),
        pointwise=pointwise,
        flops_per_point=flops_per_point,
        matrix_flops_per_point=matrix_flops_per_point,
        matrix_efficiency=matrix_efficiency,
        manual=frozenset(index[name] for name in manual if name in index),
        halos=tuple(Halo(o, d, named[o][d][0], window) for (o, d), window in windows.items() if named[o][d]),
        exchanges=tuple(
            Exchange(index[one.name], operand_shapes[0], named[0], one.most, one.elements)
            for one in sent
            if one.name in index
        ),
        sums=tuple(tuple(index[name] for name in names if name in index) for names in sums),
        stored=tuple(tuple(index[name] for name in names if name in index) for names in stored),
    )


def _factor_sizes(
    terms: Sequence[DimNames],
    shapes: Sequence[tuple[int, ...]],
    sizes: dict[Name, int],
    windows: Collection[tuple[int, int]],
) -> dict[Name, int]:
    """The size of each named factor, in order of first use, without those of size 1 or 0."""
    for t, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        assert len(term) == len(shape), f"{term} names {len(term)} dims of shape {shape}"
        for d, (names, size) in enumerate(zip(term, shape, strict=True)):
            if len(names) == 1 and size > 1 and (t, d) not in windows:
                known = sizes.setdefault(names[0], size)
                assert known == size, f"factor {names[0]!r} has size {known} and {size}"
    return {name: size for name, size in sizes.items() if size > 1}
