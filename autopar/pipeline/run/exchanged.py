"""Say in which form replicas of a stage exchange what they accumulated.

In: the accumulators and stacks of a stage, and the shardings of its plan.
Out: `Exchanged`, the type of each as it passes between pieces. Pieces return it with this sharding, so that every process knows
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop.partition_spec import named_shardings
from autopar.pipeline.cut.deferred_reductions import DeferredReduction
from autopar.pipeline.cut.pieces import Layout, Slot
from autopar.pipeline.cut.wires import even_part
from autopar.pipeline.run.deferred_reductions import accumulator_sharding
from autopar.pipeline.run.uneven_values import UnevenValues


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A value that replicas of a stage send to each other after their microbatches.

    Args:
        shape, dtype: of the array that passes between pieces.
        sharding: its sharding on the submesh of the stage.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding


@dataclass(frozen=True, slots=True)
class ExchangedForms:
    """The forms of a stage's values between pieces.

    Args:
        at_definition: the shardings that each value goes through where it is defined, as planned.
        partial: the accumulators that are reduced over devices after the loop, by their value in it.
        uneven: the values that are passed padded.
        shape, mesh: the planned mesh and its devices.
    """

    layout: Layout
    at_definition: Mapping[int, tuple[TensorSharding, ...]]
    partial: Mapping[int, DeferredReduction]
    uneven: UnevenValues
    shape: MeshShape
    mesh: Mesh

    def of(self, accumulators: Iterable[int]) -> Iterator[tuple[Slot, Exchanged]]:
        """What replicas exchange: these accumulators, and the rows that each microbatch stacks."""
        avals = self.layout.trace.avals
        for carry in accumulators:
            yield Slot("carry", carry), self._accumulator(carry)
        for leave in self.layout.stacks:
            (stack,) = self.layout.trace.equations[leave].results
            yield Slot("each", stack), self._as_planned(stack, avals[stack].shape[1:], 1)

    def _accumulator(self, carry: int) -> Exchanged:
        aval, partial = self.layout.trace.avals[carry], self.partial.get(carry)
        if partial is not None:
            parts = (self.shape.sizes(partial.axes), *aval.shape)
            return Exchanged(parts, aval.dtype, accumulator_sharding(partial, self.mesh))
        if carry in self.uneven.shapes:
            _, even, sharding = self.uneven.shapes[carry]
            return Exchanged(even, aval.dtype, sharding)
        return self._as_planned(carry, aval.shape, 0)

    def _as_planned(self, value: int, shape: tuple[int, ...], first: int) -> Exchanged:
        """A value with the evenly divided dims of its planned sharding, from a dim on; replicated if it has none."""
        path = self.at_definition.get(value, ())
        dims = path[-1].resolved().dims[first:] if path else ((),) * len(shape)
        even = even_part(TensorSharding(dims), shape, self.shape)
        return Exchanged(shape, self.layout.trace.avals[value].dtype, named_shardings([even], self.mesh)[0])
