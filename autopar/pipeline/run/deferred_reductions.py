"""Defer reductions over devices until after the microbatch loop.

In: the pieces and shardings of a planned stage.
Out: its `PartialSum`s: accumulators to which each microbatch adds an unreduced contraction, such as a weight gradient
that is unreduced over the data-parallel axes. Each piece is a separate program, so XLA would run the all-reduce once
per microbatch. Instead the accumulator gets a leading dim that is sharded over those axes: each device adds its own
term, and one reduction follows the loop. A reduction is deferred only if this takes no more memory, that is, if the
planned accumulator is not sharded over those axes.
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

    def accumulator_sharding(self, mesh: Mesh) -> NamedSharding:
        """The accumulator's sharding, with its leading dim."""
        return NamedSharding(mesh, PartitionSpec(self.axes, *partition_spec(self.sharding)))

    def initial(self, value: Any, mesh: Mesh, num_parts: int) -> Any:
        """The accumulator before the first microbatch: `value` on the first device of `axes`, zeros on the others."""
        first = jax.lax.broadcasted_iota(jnp.int32, (num_parts, *value.shape), 0) == 0
        return jax.lax.with_sharding_constraint(
            jnp.where(first, value[None], jnp.zeros_like(value)), self.accumulator_sharding(mesh)
        )

    def accumulate(self, value: Any, part: Part, mesh: Mesh) -> Any:
        """The accumulator after a microbatch; each device adds its own term."""
        trace = part.replay.trace
        equations = [trace.equations[n] for n in self.term]

        def term(*operands: Any) -> Any:
            values: Sequence[Any] = operands
            for equation in equations:
                (result,) = jax_compat.bind(equation.source, values)
                values = [result]
            return values[0][None]

        specs = tuple(map(partition_spec, self.operands))
        split = jax.shard_map(
            term,
            mesh=mesh,
            in_specs=specs,
            out_specs=self.accumulator_sharding(mesh).spec,
            axis_names=set(mesh.axis_names),
            check_vma=False,
        )
        return value + split(*(part.operand(self.term[0], i) for i in range(len(specs))))


def partial_sums(layout: Layout, replay: Replay, mesh: MeshShape) -> dict[int, PartialSum]:
    """The accumulators whose reduction can be deferred, by the equation that takes them into the loop."""
    return _Finding(layout, replay, mesh).run()


class _Finding:
    def __init__(self, layout: Layout, replay: Replay, mesh: MeshShape) -> None:
        self.layout, self.replay, self.mesh = layout, replay, mesh
        trace = layout.trace
        self.producers = trace.producers
        self.num_users = Counter({value: len(users) for value, users in trace.users.items()})
        self.num_users.update(v for v in trace.outputs if isinstance(v, int))
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
        if not isinstance(total, int) or self.num_users[carry] != 1 or self.num_users[total] != 1:
            return None
        adds = equations[self.producers[total]] if total in self.producers else None
        if adds is None or not traits_of(adds.primitive).adds or carry not in adds.operands:
            return None
        value = next((v for v in adds.operands if v != carry), None)
        chain: list[int] = []
        while isinstance(value, int) and self.num_users[value] == 1 and value in self.phases_of:
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
        """Values produced in the loop's body outside inner loops."""
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
            path = self.replay.shardings.at_operand.get((chain[0], i)) or self.replay.shardings.at_definition.get(atom)
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
        planned = self.replay.shardings.at_definition.get(carry, (TensorSharding(((),) * len(dims)),))[-1]
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
