"""Hand arrays over between workers and shards in one process, and count their bytes.

In: pushed updates and pulled arrays. Out: the same on the device, or in the sharding, of the receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from autopar.versions.host_memory.memory_kinds import in_host_memory, put
from autopar.versions.layout_choice import Place
from autopar.versions.server_update import Pushed


@dataclass(slots=True)
class Traffic:
    """Bytes of array data between a worker and a shard.

    Args:
        pushed_bytes: from the worker to the shard.
        pulled_bytes: from the shard to the worker.
    """

    pushed_bytes: int = 0
    pulled_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LocalTransport:
    """Copies between devices of one process; an array that is where it should be is passed on as it is.

    Args:
        workers: for each shard, the worker on its machine, whose pulls and pushes of it are no traffic.
        traffic: bytes by worker (None for a reader that is no worker) and number of the shard.
    """

    workers: Sequence[int | None] = (None,)
    traffic: defaultdict[tuple[int | None, int], Traffic] = field(default_factory=lambda: defaultdict(Traffic))

    def push(self, worker: int, shard: int, pushed: Pushed, place: Place) -> Pushed:
        """Move an update to its shard."""
        if worker != self.workers[shard]:
            self.traffic[worker, shard].pushed_bytes += pushed.num_bytes
        return pushed.moved(place)

    def pull(
        self, worker: int | None, to: Place | None, shard: int, arrays: Mapping[str, jax.Array], row_bytes: int
    ) -> dict[str, jax.Array]:
        """Move arrays of one shard to a worker.

        Args:
            to: its device or sharding; None leaves arrays where they are.
            row_bytes: of the numbers of rows by which it asked for some arrays.
        """
        if worker is None or worker != self.workers[shard]:
            self.traffic[worker, shard].pulled_bytes += row_bytes + sum(array.nbytes for array in arrays.values())
        if to is None:
            return dict(arrays)
        if len(arrays) > 1 and not any(map(in_host_memory, arrays.values())):
            return jax.device_put(dict(arrays), to)
        return {key: put(array, to) for key, array in arrays.items()}  # a single array takes half the time
