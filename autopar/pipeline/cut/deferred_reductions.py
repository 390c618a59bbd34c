"""Find the reductions over devices that can wait until after the microbatch loop.

In: the layout of a planned stage, and the shardings of its values.
Out: its `DeferredReduction`s: accumulators to which each microbatch adds an unreduced contraction, such as a weight
gradient that is unreduced over the data-parallel axes. The executor adds up the terms of each device and reduces them
once (`run.deferred_reductions`); prices of stages count them once (`search.estimates`). A reduction is deferred only if
this takes no more memory, that is, if the planned accumulator is not sharded over those axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.frontend.equations import LiteralOperand, Region
from autopar.frontend.trace import Trace
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.pieces import Layout
from autopar.rules.table import traits_of


class KnownShardings(Protocol):
    """The shardings of a stage's values."""

    def of_operand(self, node: int, index: int, value: int) -> TensorSharding | None:
        """The sharding in which an equation reads a value; None where the plan leaves it open."""
        ...

    def of_value(self, value: int) -> TensorSharding | None:
        """The sharding of a value where it is defined; None where the plan leaves it open."""
        ...


@dataclass(frozen=True, slots=True)
class DeferredReduction:
    """An accumulator that is reduced over devices after the loop.

    Args:
        carry: the accumulator's value in the loop.
        leave: the equation that takes the accumulator out of the loop.
        term: the equations that compute what is added, the contraction first.
        operands: the shardings of the contraction's operands.
        sharding: the sharding of the added term, before the reduction over `axes`.
        axes: the mesh axes over which the term is unreduced.
    """

    carry: int
    leave: int
    term: tuple[int, ...]
    operands: tuple[TensorSharding, ...]
    sharding: TensorSharding
    axes: tuple[str, ...]


def deferred_reductions(layout: Layout, shardings: KnownShardings, mesh: MeshShape) -> dict[int, DeferredReduction]:
    """The accumulators whose reduction can be deferred, by the equation that takes them into the loop."""
    return _Finding(layout, shardings, mesh).run()


def deferrable(trace: Trace) -> set[int]:
    """The accumulators of the microbatch loop, by their values in it, whose reduction can wait under some sharding."""
    loop = next(region for region in trace.regions if region.source is trace.microbatches)
    enters = [n for n in range(*loop.enter) if trace.equations[n].piece == "enter_carry"]
    leaves = [n for n in range(*loop.exit) if trace.equations[n].piece == "exit_carry"]
    terms = _Terms(trace, loop)
    return {carry for enter, leave in zip(enters, leaves, strict=True) for carry, _ in terms.of(enter, leave)}


class _Terms:
    """What each microbatch adds to accumulators."""

    def __init__(self, trace: Trace, loop: Region) -> None:
        self.trace, self.producers = trace, trace.producers
        self.num_users = Counter({value: len(users) for value, users in trace.users.items()})
        self.num_users.update(v for v in trace.outputs if isinstance(v, int))
        nested = {n for one in trace.regions if one is not loop for n in range(one.enter[0], one.exit[1])}
        body = range(*loop.sections[0])
        self.inside = {v for v, n in self.producers.items() if n in body and n not in nested}

    def of(self, enter: int, leave: int) -> list[tuple[int, tuple[int, ...]]]:
        """An accumulator and the equations that compute what is added, a contraction first; empty if there is none."""
        equations, (carry,) = self.trace.equations, self.trace.equations[enter].results
        total = equations[leave].operands[0]
        if not isinstance(total, int) or self.num_users[carry] != 1 or self.num_users[total] != 1:
            return []
        adds = equations[self.producers[total]] if total in self.producers else None
        if adds is None or not traits_of(adds.primitive).adds or carry not in adds.operands:
            return []
        value = next((v for v in adds.operands if v != carry), None)
        chain: list[int] = []
        while isinstance(value, int) and self.num_users[value] == 1 and value in self.inside:
            chain.insert(0, self.producers[value])
            equation = equations[chain[0]]
            if equation.primitive in ("dot_general", "reduce_sum"):
                return [(carry, tuple(chain))]
            traits, value = traits_of(equation.primitive), equation.operands[0]
            if not traits.one_to_one or not (traits.elementwise or traits.permutes):
                return []
        return []


class _Finding:
    def __init__(self, layout: Layout, shardings: KnownShardings, mesh: MeshShape) -> None:
        self.layout, self.shardings, self.mesh = layout, shardings, mesh
        self.producers = layout.trace.producers
        self.phases = layout.phases(splits_backward=True)

    def run(self) -> dict[int, DeferredReduction]:
        terms = _Terms(self.layout.trace, self.layout.loop)
        found: dict[int, DeferredReduction] = {}
        for enter, leave in self.layout.carries.items():
            for carry, chain in terms.of(enter, leave):
                one = self._split(carry, leave, chain)
                if one is not None:
                    found[enter] = one
        return found

    def _split(self, carry: int, leave: int, chain: tuple[int, ...]) -> DeferredReduction | None:
        trace = self.layout.trace
        equation = trace.equations[chain[0]]
        if len({self.phases[n] for n in (*chain, self.producers[self._total(leave)])}) > 1:
            return None
        operands: list[TensorSharding] = []
        for i, atom in enumerate(equation.operands):
            if isinstance(atom, LiteralOperand):
                return None
            sharding = self.shardings.of_operand(chain[0], i, atom)
            if sharding is None or sharding.unreduced or not sharding.divides(trace.avals[atom].shape, self.mesh):
                return None
            operands.append(sharding)
        made = _contracted(equation, operands)
        if made is None:
            return None
        axes, dims = made
        for n in chain[1:]:
            if traits_of(trace.equations[n].primitive).permutes:
                dims = tuple(dims[i] for i in trace.equations[n].source.params["permutation"])
        planned = self.shardings.of_value(carry) or TensorSharding(((),) * len(dims))
        sharding, shape = TensorSharding(dims), trace.avals[carry].shape
        used = [axis for axis in (*axes, *sharding.axes) if self.mesh.size(axis) > 1]
        fits = sharding.divides(shape, self.mesh) and len(set(used)) == len(used)
        if self.mesh.sizes(axes) == 1 or not fits or len(shape) != len(dims):
            return None
        if sharding.local_size(shape, self.mesh) > planned.resolved().local_size(shape, self.mesh):
            return None
        return DeferredReduction(carry, leave, chain, tuple(operands), sharding, axes)

    def _total(self, leave: int) -> int:
        total = self.layout.trace.equations[leave].operands[0]
        assert isinstance(total, int)
        return total


def _contracted(
    equation: Any, operands: Sequence[TensorSharding]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]] | None:
    """The axes over which a contraction's result is unreduced, and its dims' axes. None if the contracted or batch
    dims of the two operands are sharded differently."""
    if equation.primitive == "reduce_sum":
        reduced = equation.source.params["axes"]
        axes = tuple(axis for dim in reduced for axis in operands[0].dims[dim])
        return axes, tuple(axes for dim, axes in enumerate(operands[0].dims) if dim not in reduced)
    (left, right), (left_batch, right_batch) = equation.source.params["dimension_numbers"]
    one, other = operands
    pairs = [*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)]
    if any(one.dims[i] != other.dims[j] for i, j in pairs):
        return None
    axes = tuple(axis for dim in left for axis in one.dims[dim])
    batch = tuple(one.dims[dim] for dim in left_batch)
    free = [dims for dim, dims in enumerate(one.dims) if dim not in (*left, *left_batch)]
    free += [dims for dim, dims in enumerate(other.dims) if dim not in (*right, *right_batch)]
    return axes, (*batch, *free)
