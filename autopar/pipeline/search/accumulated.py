"""Count what a stage accumulates over its microbatches, which replicas of the stage exchange.

In: a planned stage. Out: bytes by accumulator and stack.
"""

from __future__ import annotations

from autopar.pipeline.search.ops_in_pieces import OpsInPieces
from autopar.planner.candidate import Candidate


def accumulated_bytes(pieces: OpsInPieces) -> dict[int, float]:
    """Bytes on a device of each accumulator and stack, by the equation that brings it into the loop or out of it."""
    candidate, layout, found = pieces.candidate, pieces.layout, dict[int, float]()
    equations, users = layout.trace.equations, layout.trace.users
    for enter in layout.carries:
        (carry,) = equations[enter].results
        if users.get(carry):
            waits = pieces.deferred.get(enter)
            found[enter] = _local_bytes(candidate, carry) if waits is None else pieces.deferred_bytes(waits)
    return found | {leave: _local_bytes(candidate, equations[leave].results[0]) for leave in layout.stacks}


def _local_bytes(candidate: Candidate, value: int) -> float:
    """Bytes of a value on a device, once it is reduced."""
    explicit, formulation = candidate.parts.explicit, candidate.formulation
    array, tensor = explicit.made.get(value), formulation.graph.values[value]
    if array is None:
        return tensor.num_bytes
    sharding = explicit.arrays[array].sharding.resolved()
    return sharding.local_size(tensor.shape, formulation.mesh) * tensor.itemsize
