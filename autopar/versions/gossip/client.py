"""Train by gossip over processes: each is one worker, and exchanges weights with its neighbors' processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import jax

from autopar.errors import ProcessError, StoreError
from autopar.versions.consistency.mixing import Mixing, find_mixing
from autopar.versions.gossip.peer import GossipTraffic, Peer
from autopar.versions.keys import Keys
from autopar.versions.layout_choice import Place
from autopar.versions.remote.channel import Channel, open_channel
from autopar.versions.server_update import Weights
from autopar.versions.store_values import Pulled


@dataclass(frozen=True, slots=True)
class _RemoteLinks:
    """This process's links: messages by the coordination service, arrays directly between the processes.

    Args:
        digest: of the mixing matrix and the kinds of the arrays, which are the same in all workers.
    """

    peer: Peer
    channel: Channel
    digest: str

    def publish(self, clock: int, weights: Weights) -> None:
        own = self.peer.worker
        for neighbor in self.peer.mixing.neighbors(own):
            self.channel.send(f"{own}/{neighbor}/{clock}", self.digest, list(weights.values()))
            self.peer.traffic.sent_bytes += self.peer.num_bytes

    def receive(self, clock: int, neighbor: int) -> Weights:
        def check_ended() -> None:
            ended = self.channel.service.get(f"{self.channel.root}/ended/{neighbor}", 0.01)
            if ended is not None:
                raise StoreError(
                    f"worker {self.peer.worker}, at clock {clock}, waits for the weights of its neighbor {neighbor}, which"
                    f" {ended.decode()}: all workers take the same number of clocks"
                )

        key = f"{neighbor}/{self.peer.worker}/{clock}"
        digest, arrays = self.channel.receive(key, f"worker {neighbor}", check_ended)
        if digest != self.digest:
            raise StoreError(
                f"workers {self.peer.worker} and {neighbor} have other mixing matrices, or arrays of other names, shapes or dtypes:"
                " pass the same `values` and `mixing` in all processes"
            )
        self.peer.traffic.received_bytes += self.peer.num_bytes
        own = self.peer.shard.weights
        return {key: jax.device_put(array, own[key].sharding) for key, array in zip(own, arrays, strict=True)}


class GossipClient:
    """The worker of this process in decentralized training (D-PSGD) over all processes; a context.

    Its calls are those of `GossipStore`. Call `jax.distributed.initialize` first; worker i is process i. A block that ends without
    an error waits until the neighbors have ended too, as they may still fetch its weights.

    Args:
        values: arrays by key, of floating-point numbers; the same in all processes.
        mixing: as for `GossipStore`; the same in all processes.
        update: as for `GossipStore`.
        name: of this training, if there are several.
        to: the worker's device or sharding; None for the first device of its process.

    Raises:
        StoreError: an argument that cannot be, `jax.distributed.initialize` was not called, or the name is in use.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        mixing: str | Mixing | Any = "ring",
        *,
        update: Any = None,
        name: str = "gossip",
        to: Place | None = None,
    ) -> None:
        channel = open_channel(f"{name} (gossip)", f"worker {jax.process_index()}")
        found = find_mixing(mixing, jax.process_count())
        place = jax.local_devices()[0] if to is None else to
        self._peer = Peer(jax.process_index(), values, update, found, place)
        kinds = [[key, list(shape), str(dtype)] for key, (shape, dtype) in self._peer.kinds.items()]
        digest = hashlib.sha256(json.dumps([found.weights, kinds]).encode()).hexdigest()
        self._links = _RemoteLinks(self._peer, channel, digest)
        self._has_left = False
        try:
            channel.service.put(f"{channel.root}/clients/{self._peer.worker}", b"")
        except ProcessError as error:
            raise StoreError(
                f"this process has, or had, a worker of {name!r} already, or process 0 is gone: give each training a `name`"
                f" ({error})"
            ) from error
        channel.beat()

    @property
    def worker(self) -> int:
        """The number of this worker."""
        return self._peer.worker

    @property
    def mixing(self) -> Mixing:
        """The mixing matrix."""
        return self._peer.mixing

    def pull(self, keys: Keys = None, *, to: Place | None = None) -> Pulled:
        """As `GossipStore.pull`. The first pull of a clock offers the weights to the neighbors, which fetch them while the
        worker computes. Pull the last weights after the block, where they are offered to nobody."""
        if not self._has_left:
            self._peer.publish(self._links)
        return self._peer.pull(keys, to)

    def push(self, keys: Keys, update: Any) -> None:
        """As `GossipStore.push`."""
        self._peer.push(keys, update)

    def clock(self) -> int:
        """As `GossipStore.clock`.

        Raises:
            StoreError: a neighbor has left, failed or died, or this worker has left.
        """
        if self._has_left:
            raise StoreError(f"worker {self._peer.worker} has left the training: it takes no clock after its block")
        return self._peer.finish(self._links)

    def traffic(self) -> GossipTraffic:
        """The bytes of arrays that this worker exchanged with its neighbors."""
        return replace(self._peer.traffic)

    def __enter__(self) -> GossipClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        channel, clock = self._links.channel, self._peer.clock
        self._has_left = True
        try:
            words = "has left" if error is None else f"failed ({type(error).__name__}: {str(error)[:200]})"
            channel.service.put(f"{channel.root}/ended/{self._peer.worker}", f"{words} at clock {clock}".encode())
            if error is None:
                for neighbor in self._peer.mixing.neighbors(self._peer.worker):
                    channel.wait_for(f"ended/{neighbor}", f"worker {neighbor}")
        finally:
            channel.over.set()
