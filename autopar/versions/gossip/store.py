"""Train by gossip in one process: workers in threads, or one after another in a plain loop."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import StoreError
from autopar.versions.callers import Callers
from autopar.versions.consistency.mixing import Mixing, find_mixing
from autopar.versions.gossip.peer import GossipTraffic, Peer
from autopar.versions.keys import Keys
from autopar.versions.layout_choice import Place
from autopar.versions.server_update import Weights
from autopar.versions.store_values import Pulled
from autopar.versions.wait import PART_OF_A_WAIT_S


@dataclass(slots=True)
class _Published:
    """The weights that neighbors may still receive: a worker is at most one clock ahead of a neighbor."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    weights: dict[tuple[int, int], Weights] = field(default_factory=dict)  # by worker and clock
    ended: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LocalLinks:
    """One worker's links to neighbors in this process: copies between devices."""

    peers: Sequence[Peer]
    worker: int
    published: _Published
    callers: Callers

    def publish(self, clock: int, weights: Weights) -> None:
        with self.published.changed:
            self.published.weights[self.worker, clock] = weights
            self.published.weights.pop((self.worker, clock - 2), None)
            self.published.changed.notify_all()

    def receive(self, clock: int, neighbor: int) -> Weights:
        published, worker = self.published, self.worker
        with published.changed:
            while (found := published.weights.get((neighbor, clock))) is None:
                reason = published.ended.get(neighbor) or self.callers.stopped(worker).get(neighbor)
                if reason:
                    raise StoreError(
                        f"worker {worker}, at clock {clock}, waits for the weights of its neighbor {neighbor}, which {reason}:"
                        " all workers take the same number of clocks"
                    )
                published.changed.wait(PART_OF_A_WAIT_S)
            num_bytes = self.peers[neighbor].num_bytes
            self.peers[neighbor].traffic.sent_bytes += num_bytes
            self.peers[worker].traffic.received_bytes += num_bytes
        places = {key: array.sharding for key, array in self.peers[worker].shard.weights.items()}
        return {key: jax.device_put(array, places[key]) for key, array in found.items()}


class GossipStore:
    """Weights of several workers in one process, each of which averages its own with those of its neighbors (D-PSGD).

    In each clock a worker pulls its weights x_i, computes, pushes its update u_i, and calls `clock()`, which waits for the
    neighbors' weights of the same clock: x_i becomes sum over j of W_ij x_j, plus what `update` makes of u_i. There is no server,
    and no worker has all weights. Workers are threads, or one loop that runs each clock of all workers in turn.

    Args:
        values: arrays by key, of floating-point numbers, from which all workers start; they are copied.
        mixing: W: "ring", "complete", "torus(2, 4)", "hypercube", or a symmetric doubly stochastic matrix that connects all
            workers.
        update: as for `VersionedStore`: None adds what a worker pushes; an optax transformation has a state per worker.
        workers: their number.
        places: a device or sharding for each worker; None to leave the arrays where they are.

    Raises:
        StoreError: an argument that cannot be.

    >>> import numpy as np
    >>> store = GossipStore({"w": np.zeros(1, np.float32)}, "complete", workers=2)
    >>> store.push("w", np.ones(1, np.float32), worker=1)
    >>> for clock in range(2):
    ...     for worker in range(2):
    ...         _ = store.clock(worker=worker)
    >>> [store.pull("w", worker=worker).values["w"].item() for worker in range(2)]
    [0.5, 0.5]
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        mixing: str | Mixing | Any = "ring",
        *,
        update: Any = None,
        workers: int = 2,
        places: Sequence[Place] | None = None,
    ) -> None:
        self._mixing = find_mixing(mixing, workers)
        if places is not None and len(places) != workers:
            raise StoreError(f"`places` has {len(places)} places for {workers} workers: give one for each")
        self._callers, self._published = Callers(), _Published()
        self._peers = [
            Peer(worker, values, update, self._mixing, None if places is None else places[worker])
            for worker in range(workers)
        ]
        self._links = [_LocalLinks(self._peers, worker, self._published, self._callers) for worker in range(workers)]
        for peer, links in zip(self._peers, self._links, strict=True):
            peer.publish(links)

    @property
    def mixing(self) -> Mixing:
        """The mixing matrix."""
        return self._mixing

    def pull(self, keys: Keys = None, *, worker: int = 0, to: Place | None = None) -> Pulled:
        """A worker's weights; keys as for `VersionedStore.pull`. Nothing is sent but to the device `to`."""
        return self._peer(worker).pull(keys, to)

    def push(self, keys: Keys, update: Any, *, worker: int = 0) -> None:
        """Add to a worker's update of its present clock; arguments as for `VersionedStore.push`."""
        self._called(worker).push(keys, update)

    def clock(self, *, worker: int = 0) -> int:
        """Wait for the neighbors' weights of this clock, mix, and apply the update. Returns the worker's next clock.

        Raises:
            StoreError: a neighbor has left or failed, or will not come to this clock.
        """
        peer, links = self._called(worker), self._links[worker]
        clock = peer.finish(links)
        peer.publish(links)
        return clock

    def worker(self, index: int) -> GossipWorker:
        """One worker's view of the store, as a context: it leaves at the end, and after an error neighbors stop waiting."""
        self._called(index)
        return GossipWorker(self, index)

    def leave(self, worker: int = 0, reason: str = "has left") -> None:
        """Say that a worker takes no further clock: neighbors that wait for one raise an error."""
        with self._published.changed:
            self._published.ended[worker] = f"{reason} at clock {self._peer(worker).clock}"
            self._published.changed.notify_all()

    def mean(self) -> dict[str, jax.Array]:
        """The mean of all workers' weights by key, on the place of worker 0: the model to keep."""
        first, *others = (peer.shard.weights for peer in self._peers)
        total = {key: array.astype(jnp.promote_types(array.dtype, jnp.float32)) for key, array in first.items()}
        for weights in others:
            total = {key: array + jax.device_put(weights[key], first[key].sharding) for key, array in total.items()}
        return {key: (array / len(self._peers)).astype(first[key].dtype) for key, array in total.items()}

    def traffic(self) -> tuple[GossipTraffic, ...]:
        """For each worker, the bytes of arrays that it exchanged with its neighbors."""
        return tuple(replace(peer.traffic) for peer in self._peers)

    def _peer(self, worker: int) -> Peer:
        if not isinstance(worker, int) or isinstance(worker, bool) or not 0 <= worker < len(self._peers):
            raise StoreError(
                f"there is no worker {worker!r}: the store was made for workers 0 to {len(self._peers) - 1}"
            )
        return self._peers[worker]

    def _called(self, worker: int) -> Peer:
        peer = self._peer(worker)
        if worker in self._published.ended:
            raise StoreError(f"worker {worker} {self._published.ended[worker]}: it makes no calls after that")
        self._callers.called(worker)
        return peer


@dataclass(frozen=True, slots=True)
class GossipWorker:
    """A worker of a `GossipStore`, as a context."""

    store: GossipStore
    index: int

    def pull(self, keys: Keys = None, *, to: Place | None = None) -> Pulled:
        """As `GossipStore.pull`."""
        return self.store.pull(keys, worker=self.index, to=to)

    def push(self, keys: Keys, update: Any) -> None:
        """As `GossipStore.push`."""
        self.store.push(keys, update, worker=self.index)

    def clock(self) -> int:
        """As `GossipStore.clock`."""
        return self.store.clock(worker=self.index)

    def __enter__(self) -> GossipWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        failed = f"failed ({type(error).__name__}: {str(error)[:200]})"
        self.store.leave(self.index, "has left" if error is None else failed)
