"""Sums over devices that are taken once, after the loop over microbatches.

In: where things stand in a planned stage. Out: the `PartialSum`s of it: accumulators to which each microbatch adds what
a contraction leaves to be summed over some mesh axes, as a gradient's sum over the devices that share the examples. In
pieces, which are programs of their own, XLA would take that sum in each microbatch. Instead the accumulator has a leading
dim, split over those axes: each device adds its own term to its own part, and the parts are summed after the loop. That
is done where it takes no more memory: where the planned accumulator is not split over those axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend.equations import LiteralOperand
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import partition_spec
from autopar.pipeline.cut.pieces import Layout
from autopar.rules.table import traits_of
from autopar.runtime.registered_collectives import reached
from autopar.runtime.replay import Part, Replay


@dataclass(frozen=True, slots=True)
class PartialSum:
    """An accumulator whose parts are summed after the loop.

    Args:
        carry: the accumulator in the loop. leave: the equation that hands it on.
        term: the equations that make what is added, the contraction first.
        operands: how the contraction's operands are split. sharding: how what is added is, before the sum over `axes`.
    """

    carry: int
    leave: int
    term: tuple[int, ...]
    operands: tuple[TensorSharding, ...]
    sharding: TensorSharding
    axes: tuple[str, ...]

    def laid(self, mesh: Mesh) -> NamedSharding:
        """How the accumulator lies, with its leading dim."""
        return NamedSharding(mesh, PartitionSpec(self.axes, *partition_spec(self.sharding)))

    def begun(self, value: Any, mesh: Mesh, num_parts: int) -> Any:
        """The accumulator before the first microbatch: what it begins with in the first part, nothing in the others."""
        first = jax.lax.broadcasted_iota(jnp.int32, (num_parts, *value.shape), 0) == 0
        return jax.lax.with_sharding_constraint(jnp.where(first, value[None], jnp.zeros_like(value)), self.laid(mesh))

    def added(self, value: Any, part: Part, mesh: Mesh) -> Any:
        """The accumulator after a microbatch, each device's term made by itself."""
        trace = part.replay.trace
        equations = [trace.equations[n] for n in self.term]

        def term(*operands: Any) -> Any:
            given: Sequence[Any] = operands
            for equation in equations:
                (made,) = jax_compat.bind(equation.source, given)
                given = [made]
            return given[0][None]

        specs = tuple(map(partition_spec, self.operands))
        split = jax.shard_map(
            term,
            mesh=mesh,
            in_specs=specs,
            out_specs=self.laid(mesh).spec,
            axis_names=set(mesh.axis_names),
            check_vma=False,
        )
        return value + split(*(part.operand(self.term[0], i) for i in range(len(specs))))


def partial_sums(layout: Layout, replay: Replay, mesh: MeshShape) -> dict[int, PartialSum]:
    """By the equation that lets it into the loop, each accumulator whose sum over devices can wait."""
    return _Finding(layout, replay, mesh).run()


class _Finding:
    def __init__(self, layout: Layout, replay: Replay, mesh: MeshShape) -> None:
        self.layout, self.replay, self.mesh = layout, replay, mesh
        trace = layout.trace
        self.producers = trace.producers
        self.readers = Counter({value: len(users) for value, users in trace.users.items()})
        self.readers.update(v for v in trace.outputs if isinstance(v, int))
        nested = (region for region in trace.regions if region is not layout.loop)
        self.nested = {n for region in nested for n in range(region.enter[0], region.exit[1])}
        self.phases = layout.phases(splits_backward=True)

    def run(self) -> dict[int, PartialSum]:
        found: dict[int, PartialSum] = {}
        for enter, leave in self.layout.carries.items():
            one = self._of(enter, leave)
            if one is not None:
                found[enter] = one
        return found

    def _of(self, enter: int, leave: int) -> PartialSum | None:
        equations, (carry,) = self.layout.trace.equations, self.layout.trace.equations[enter].results
        total = equations[leave].operands[0]
        if not isinstance(total, int) or self.readers[carry] != 1 or self.readers[total] != 1:
            return None
        adds = equations[self.producers[total]] if total in self.producers else None
        if adds is None or not traits_of(adds.primitive).adds or carry not in adds.operands:
            return None
        value = next((v for v in adds.operands if v != carry), None)
        chain: list[int] = []
        while isinstance(value, int) and self.readers[value] == 1 and value in self.phases_of:
            chain.insert(0, self.producers[value])
            equation = equations[chain[0]]
            if equation.primitive in ("dot_general", "reduce_sum"):
                return self._split(carry, leave, tuple(chain))
            traits, value = traits_of(equation.primitive), equation.operands[0]
            if not traits.one_to_one or not (traits.elementwise or traits.permutes):
                return None
        return None

    @property
    def phases_of(self) -> Mapping[int, int]:
        """Values that the loop's body makes outside inner loops."""
        begin, end = self.layout.loop.sections[0]
        return {v: n for v, n in self.producers.items() if begin <= n < end and n not in self.nested}

    def _split(self, carry: int, leave: int, chain: tuple[int, ...]) -> PartialSum | None:
        trace = self.layout.trace
        equation = trace.equations[chain[0]]
        if len({self.phases[n] for n in (*chain, self.producers[self._total(leave)])}) > 1:
            return None
        operands: list[TensorSharding] = []
        for i, atom in enumerate(equation.operands):
            if isinstance(atom, LiteralOperand):
                return None
            path = self.replay.at_operand.get((chain[0], i)) or self.replay.at_definition.get(atom)
            if not path:
                return None
            sharding = reached(path[-1])
            if sharding.unreduced or not sharding.divides(trace.avals[atom].shape, self.mesh):
                return None
            operands.append(sharding)
        made = _contracted(equation, operands)
        if made is None:
            return None
        axes, dims = made
        for n in chain[1:]:
            if traits_of(trace.equations[n].primitive).permutes:
                dims = tuple(dims[i] for i in trace.equations[n].source.params["permutation"])
        planned = self.replay.at_definition.get(carry, (TensorSharding(((),) * len(dims)),))[-1]
        sharding, shape = TensorSharding(dims), trace.avals[carry].shape
        used = [axis for axis in (*axes, *sharding.axes) if self.mesh.size(axis) > 1]
        fits = sharding.divides(shape, self.mesh) and len(set(used)) == len(used)
        if self.mesh.sizes(axes) == 1 or not fits or len(shape) != len(dims):
            return None
        if sharding.local_size(shape, self.mesh) > planned.resolved().local_size(shape, self.mesh):
            return None
        return PartialSum(carry, leave, chain, tuple(operands), sharding, axes)

    def _total(self, leave: int) -> int:
        total = self.layout.trace.equations[leave].operands[0]
        assert isinstance(total, int)
        return total


def _contracted(
    equation: Any, operands: Sequence[TensorSharding]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]] | None:
    """Over which axes a contraction's operands leave its result to be summed, and how it is split; None where they are
    not split alike."""
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
