"""Defer reductions over devices until after the microbatch loop.

In: a stage's `DeferredReduction`s. Out: their accumulators. Each piece is a separate program, so XLA would run an
all-reduce in every microbatch. Instead the accumulator gets a leading dim that is sharded over the axes of the
reduction: each device adds its own term, and one reduction follows the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir.sharding import TensorSharding
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import partition_spec
from autopar.pipeline.cut.deferred_reductions import DeferredReduction
from autopar.runtime.planned_shardings import PlannedShardings
from autopar.runtime.registered_collectives import reached
from autopar.runtime.replay import Part


class ConstrainedShardings:
    """The shardings of a stage's values where its plan constrains them; see `KnownShardings`."""

    def __init__(self, planned: PlannedShardings) -> None:
        self.planned = planned

    def of_operand(self, node: int, index: int, value: int) -> TensorSharding | None:
        path = self.planned.at_operand.get((node, index)) or self.planned.at_definition.get(value)
        return reached(path[-1]) if path else None

    def of_value(self, value: int) -> TensorSharding | None:
        path = self.planned.at_definition.get(value)
        return path[-1] if path else None


def accumulator_sharding(one: DeferredReduction, mesh: Mesh) -> NamedSharding:
    """The accumulator's sharding, with its leading dim."""
    return NamedSharding(mesh, PartitionSpec(one.axes, *partition_spec(one.sharding)))


def initial(one: DeferredReduction, value: Any, mesh: Mesh, num_parts: int) -> Any:
    """The accumulator before the first microbatch: `value` on the first device of its axes, zeros on the others."""
    first = jax.lax.broadcasted_iota(jnp.int32, (num_parts, *value.shape), 0) == 0
    return jax.lax.with_sharding_constraint(
        jnp.where(first, value[None], jnp.zeros_like(value)), accumulator_sharding(one, mesh)
    )


def accumulate(one: DeferredReduction, value: Any, part: Part, mesh: Mesh) -> Any:
    """The accumulator after a microbatch; each device adds its own term."""
    trace = part.replay.trace
    equations = [trace.equations[n] for n in one.term]

    def term(*operands: Any) -> Any:
        values: Sequence[Any] = operands
        for equation in equations:
            (result,) = jax_compat.bind(equation.source, values)
            values = [result]
        return values[0][None]

    specs = tuple(map(partition_spec, one.operands))
    split = jax.shard_map(
        term,
        mesh=mesh,
        in_specs=specs,
        out_specs=accumulator_sharding(one, mesh).spec,
        axis_names=set(mesh.axis_names),
        check_vma=False,
    )
    return value + split(*(part.operand(one.term[0], i) for i in range(len(specs))))
