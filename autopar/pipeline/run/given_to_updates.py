"""Give the updates of an asynchronous pipeline what their corrections need.

In: an asynchronous schedule, `Corrections`, the stages. Out: `corrected_updates`, how each stage corrects its updates;
`GivenToUpdates`, the arrays that a stream has for them: velocities at its start, and the factor of step sizes of each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.pipeline.cut.extract_stages import LeafKey, Port
from autopar.pipeline.cut.pieces import Layout, Pieces, Slot
from autopar.pipeline.cut.updated_weights import read_by_backward, updated_weights
from autopar.pipeline.partition.streamed_time import lateness
from autopar.pipeline.run.corrected_update import SCALE, CorrectedUpdates
from autopar.pipeline.run.stream_listing import Name, Streamed
from autopar.pipeline.run.transfers import is_mine
from autopar.pipeline.schedule.corrections import Corrections
from autopar.pipeline.schedule.kind import ScheduleKind

#: Where a store has an array.
Key = tuple[int, int | None]


def corrected_updates(
    kind: ScheduleKind,
    corrections: Corrections | None,
    layouts: Sequence[Layout],
    pieces: Sequence[Pieces],
    outputs: Sequence[Sequence[Port]],
    carried: Mapping[LeafKey, LeafKey],
    num_microbatches: int,
    names: Mapping[int, str],
) -> list[CorrectedUpdates | None]:
    """How each stage corrects its updates; None if it does not.

    Args:
        outputs: the ports of each stage's outputs.
        carried: the result that replaces each carried argument.
        num_microbatches: the number of microbatches per batch, which is one update.
        names: the path of each argument, for errors.

    Raises:
        ScheduleError: the updates of a stage cannot be corrected.
    """
    if corrections is None:
        return [None] * len(layouts)
    found: list[CorrectedUpdates | None] = []
    late = lateness(kind, len(layouts), num_microbatches)
    for layout, own, ports, (delay, distance) in zip(layouts, pieces, outputs, late, strict=True):
        weights = updated_weights(layout, ports, carried, names)
        kept, scaled = corrections.kept(distance), corrections.is_scaled(delay)
        if kept is None:
            found.append(CorrectedUpdates(layout, weights, scaled))
        else:
            moved = read_by_backward(layout, own, weights.values())
            found.append(CorrectedUpdates(layout, weights, scaled, moved, kept))
    return found


class GivenToUpdates:
    """What a stream of batches has for corrected updates.

    Args:
        key: a function from a name to where the store has it.
    """

    def __init__(
        self, streamed: Streamed, key: Callable[[Name], Key], kind: ScheduleKind, corrections: Corrections | None
    ) -> None:
        self._streamed, self._key, self._corrections = streamed, key, corrections
        late = lateness(kind, len(streamed.stages), streamed.num_microbatches) if corrections is not None else ()
        self._delays = [delay for delay, _ in late]

    def at_start(self) -> Iterator[tuple[Key, Any]]:
        """Velocities of zero, of the weights that are here."""
        for s, stage in enumerate(self._streamed.stages):
            for value in sorted(stage.corrected.moved) if stage.corrected is not None else ():
                aval, sharding = stage.layout.trace.avals[value], stage.argument_sharding(value)
                if is_mine(sharding):
                    zeros = np.broadcast_to(np.zeros((), aval.dtype), aval.shape)
                    key = self._key(((s, Slot("velocity", value)), 0))
                    yield key, jax.make_array_from_callback(aval.shape, sharding, zeros.__getitem__)

    def of_update(self, number: int, before: int = 0) -> Iterator[tuple[Key, Any]]:
        """The factors of step sizes of an update, on the stages that are here.

        Args:
            number: of the update since the start of the stream.
            before: the number of updates of earlier streams.
        """
        for s, stage in enumerate(self._streamed.stages):
            if self._corrections is None or stage.corrected is None or not stage.corrected.is_scaled:
                continue
            sharding = NamedSharding(stage.stage.mesh, PartitionSpec())
            if is_mine(sharding):
                scale = np.asarray(self._corrections.scale(self._delays[s], before + number), jnp.result_type(float))
                yield self._key(((s, SCALE), number)), jax.make_array_from_callback((), sharding, scale.__getitem__)
