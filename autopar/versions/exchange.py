"""Exchange arrays between workers and shards: by key for workers, by part for shards, with the bytes counted.

In: what a pull or push names. Out: arrays at the worker, or updates at their shards.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from autopar.versions.division import Division
from autopar.versions.gather import gathered
from autopar.versions.keys import Selected
from autopar.versions.layout_choice import Place
from autopar.versions.server_update import Pushed, Update
from autopar.versions.shards import Shard
from autopar.versions.transport import LocalTransport


@dataclass(frozen=True, slots=True)
class Exchange:
    """The ways of a store in one process.

    Args:
        targets: for each part or term that may be pushed, the number of its shard, and where it goes.
    """

    division: Division
    targets: Mapping[str, tuple[int, Place]]
    transport: LocalTransport

    def at_worker(self, worker: int) -> Exchange:
        """The same with all shards on a worker's machine."""
        workers = [worker] * len(self.transport.workers)
        return replace(self, transport=replace(self.transport, workers=workers))

    def pull(
        self, shards: Sequence[Shard], chosen: Selected, worker: int | None, to: Place | None
    ) -> tuple[dict[str, jax.Array], dict[int, int]]:
        """The arrays of a pull by key, and the versions of the shards."""
        parts = self.division.chosen(chosen)
        # the rows of a part may not divide over a submesh: they are joined first
        at_once = to if parts is chosen or isinstance(to, jax.Device) else None
        hand_over = functools.partial(self.transport.pull, worker, at_once)
        values, versions = gathered(shards, parts, self.division.parts, hand_over)
        values = self.division.concatenated(values, chosen)
        return values if at_once is to else jax.device_put(values, to), versions

    def push(self, worker: int, update: Update) -> Update:
        """An update by part, at its shards."""
        found: dict[str, Pushed] = {}
        for name, pushed in update.items():
            shard, place = self.targets[name]
            found[name] = self.transport.push(worker, shard, pushed, place)
        return found


def exchange_of(
    shards: Sequence[Shard], division: Division, workers: Sequence[int | None], terms: Mapping[str, Place]
) -> Exchange:
    """The exchange of a store.

    Args:
        terms: where terms go, which are pushed in place of updates.
        workers: for each shard, the worker on its machine or None.
    """
    parts = {name: (part.shard, shards[part.shard].place(part.key)) for name, part in division.parts.items()}
    return Exchange(division, {key: (0, place) for key, place in terms.items()} or parts, LocalTransport(workers))
