"""Count what a stage accumulates over its microbatches, which replicas of the stage exchange.

In: a planned stage. Out: bytes by accumulator and stack.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.pipeline.cut.deferred_reductions import DeferredReduction
from autopar.pipeline.cut.pieces import Layout
from autopar.planner.candidate import Candidate


def accumulated_bytes(
    candidate: Candidate, layout: Layout, deferred: Mapping[int, DeferredReduction]
) -> dict[int, float]:
    """Bytes on a device of each accumulator and stack, by the equation that brings it into the loop or out of it.

    Args:
        deferred: the accumulators that are reduced over devices after the loop, by the equation that they enter by.
    """
    equations, users, found = layout.trace.equations, layout.trace.users, dict[int, float]()
    for enter in layout.carries:
        (carry,) = equations[enter].results
        if users.get(carry):
            found[enter] = _local_bytes(candidate, carry, deferred.get(enter))
    return found | {leave: _local_bytes(candidate, equations[leave].results[0]) for leave in layout.stacks}


def _local_bytes(candidate: Candidate, value: int, deferred: DeferredReduction | None = None) -> float:
    """Bytes of a value on a device, once it is reduced, or with the sharding of a deferred reduction's terms."""
    explicit, formulation = candidate.parts.explicit, candidate.formulation
    array, tensor = explicit.made.get(value), formulation.graph.values[value]
    if deferred is not None:
        sharding = deferred.sharding
    elif array is not None:
        sharding = explicit.arrays[array].sharding.resolved()
    else:
        return tensor.num_bytes
    return sharding.local_size(tensor.shape, formulation.mesh) * tensor.itemsize
