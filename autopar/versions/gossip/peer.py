"""Keep one worker's weights, and mix them with those of its neighbors.

In: what the worker pushes in a clock, and its neighbors' weights of this clock. Out: its weights of the next clock:
x_i + sum over j of W_ij (x_j - x_i), and then the update. What two workers exchange so is the same number with opposite signs, so
rounding does not move the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import StoreError
from autopar.versions.checked_update import checked
from autopar.versions.consistency.mixing import Mixing
from autopar.versions.gather import gathered
from autopar.versions.held import added
from autopar.versions.keys import Keys, selected, shown
from autopar.versions.layout_choice import Place
from autopar.versions.server_update import Update, Weights
from autopar.versions.shards import Shard, shards_of
from autopar.versions.store_values import Pulled


@dataclass(slots=True)
class GossipTraffic:
    """Bytes of arrays that one worker exchanged with its neighbors."""

    sent_bytes: int = 0
    received_bytes: int = 0


class Links(Protocol):
    """How a worker's weights reach its neighbors; links count their bytes."""

    def publish(self, clock: int, weights: Weights) -> None:
        """Let the neighbors receive the worker's weights of a clock."""
        ...

    def receive(self, clock: int, neighbor: int) -> Weights:
        """Wait for a neighbor's weights of a clock.

        Raises:
            StoreError: they will not come.
        """
        ...


class Peer:
    """One worker of decentralized training.

    Args:
        values: arrays by key; they are copied.
        update: as for a `VersionedStore`, with a state of this worker's own; it runs on the mixed weights.
        place: the worker's device or sharding; None to leave the arrays where they are.

    Raises:
        StoreError: an argument that cannot be, or arrays of whole numbers, of which there are no means.
    """

    def __init__(
        self, worker: int, values: Mapping[str, Any], update: Any, mixing: Mixing, place: Place | None
    ) -> None:
        self.worker, self.mixing = worker, mixing
        (self.shard,), self._division, _ = shards_of(values, update, None if place is None else [place])
        for key, array in self.shard.weights.items():
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                raise StoreError(
                    f"{shown(key)} is {array.dtype}: workers average weights, which takes floating-point numbers"
                )
        self.kinds = {key: (array.shape, np.dtype(array.dtype)) for key, array in self.shard.weights.items()}
        self.shapes = {key: shape for key, (shape, _) in self.kinds.items()}
        self.clock = 0
        self.traffic = GossipTraffic()
        self._open: Update = {}
        self._received: dict[int, Weights] = {}
        self._published = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(array.nbytes for array in self.shard.weights.values())

    def publish(self, links: Links) -> None:
        """Let the neighbors have the weights of this clock, once."""
        if self._published < self.clock:
            links.publish(self.clock, self.shard.weights)
            self._published = self.clock

    def pull(self, keys: Keys, to: Place | None) -> Pulled:
        """The worker's own weights."""

        def hand_over(number: int, arrays: Mapping[str, jax.Array], row_bytes: int) -> dict[str, jax.Array]:
            return dict(arrays) if to is None else jax.device_put(dict(arrays), to)

        chosen = selected(keys, self.shapes)
        values, versions = gathered([self.shard], chosen, self._division.parts, hand_over)
        return Pulled(values, versions, self.clock)

    def push(self, keys: Keys, update: Any) -> None:
        """Add to the update of this clock."""
        self._open = added(self._open, checked(update, keys, selected(keys, self.shapes), self.kinds))

    def finish(self, links: Links) -> int:
        """Mix the weights with the neighbors', apply the update, and return the next clock. After an error it can be called
        again: what was received stays."""
        for key, array in self.shard.weights.items():
            if array.is_deleted():
                raise StoreError(
                    f"the array of {shown(key)} was donated by a reader: copy what you pull before donating it"
                )
        self.publish(links)
        neighbors = self.mixing.neighbors(self.worker)
        for neighbor in neighbors:
            if neighbor not in self._received:
                self._received[neighbor] = links.receive(self.clock, neighbor)
        row = self.mixing.weights[self.worker]
        others = [self._received[neighbor] for neighbor in neighbors]
        mixed = _mixed(self.shard.weights, others, [row[neighbor] for neighbor in neighbors]) if others else None
        shard: Shard = self.shard if mixed is None else replace(self.shard, weights=mixed)
        place = {key: array.sharding for key, array in self.shard.weights.items()}
        shard = shard.updated([{key: pushed.moved(place[key]) for key, pushed in self._open.items()}])
        self.shard, self.clock, self._open, self._received = shard, self.clock + 1, {}, {}
        return self.clock


@jax.jit
def _mixed(own: Weights, others: list[Weights], shares: list[jax.Array]) -> Weights:
    def mix(mine: jax.Array, *theirs: jax.Array) -> jax.Array:
        precise = jnp.promote_types(mine.dtype, jnp.float32)
        wide = mine.astype(precise)
        change = sum(
            (share * (other.astype(precise) - wide) for share, other in zip(shares, theirs, strict=True)),
            jnp.zeros_like(wide),
        )
        return (wide + change).astype(mine.dtype)

    return jax.tree.map(mix, own, *others)
