"""Send each process's share of a batch to the stage that uses it.

In: this process's share of an array's first dim; the shares are equal and in process order.
Out: the array with its sharding on the stage's submesh; without local shards in other processes. One device of the
sending process sends its share to one device of each process that needs rows of it, which distributes the rows there.
Every process takes part in every transfer, in the same order (see `transfers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.pipeline.run.transfers import Crossing, Wire, devices_of, is_mine, without_shards

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ShareTransfer:
    """The transfer of one process's share to another process. `crossing` is None if both are the same process."""

    sender: int
    receiver: int
    crossing: Crossing | None


class Gathering:
    """Gathers the shares of arrays onto a submesh.

    Args:
        sharding: the sharding of the whole array there.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self.sharding = sharding
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self.ends = {
            process: NamedSharding(
                Mesh(np.array([device], dtype=object), ("one",), axis_types=(AxisType.Auto,)), PartitionSpec()
            )
            for process, device in first.items()
        }
        self._cached_transfers: dict[tuple[Shape, np.dtype], list[_ShareTransfer]] = {}

    def __call__(self, share: np.ndarray, shape: Shape) -> jax.Array:
        """Build the array from this process's share.

        Args:
            shape: the shape of the whole array; the number of processes divides its first dim.
        """
        key = (share.shape, share.dtype)
        if key not in self._cached_transfers:
            self._cached_transfers[key] = list(self._transfers(share.shape, share.dtype, shape))
        process, arrived = jax.process_index(), []
        local = jax.device_put(share, self.ends[process])
        for transfer in self._cached_transfers[key]:
            moved = (
                local
                if transfer.crossing is None
                else transfer.crossing.move(local if transfer.sender == process else None)
            )
            if transfer.receiver == process:
                arrived.append(moved)
        if not is_mine(self.sharding):
            return without_shards(shape, share.dtype, self.sharding)
        rows = jax.numpy.concatenate(arrived) if len(arrived) > 1 else arrived[0]
        offset = self._senders(process, share.shape[0], shape).start * share.shape[0]
        parts = []
        for device, index in self.sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            start, stop, _ = index[0].indices(shape[0])
            parts.append(jax.device_put(rows[(slice(start - offset, stop - offset), *index[1:])], device))
        return jax.make_array_from_single_device_arrays(shape, self.sharding, parts, dtype=share.dtype)

    def _transfers(self, share: Shape, dtype: Any, shape: Shape) -> Iterator[_ShareTransfer]:
        """All transfers, in the order that every process follows."""
        for receiver in sorted({device.process_index for device in devices_of(self.sharding).flat}):
            for sender in self._senders(receiver, share[0], shape):
                wire = Wire(self.ends[sender], self.ends[receiver])
                yield _ShareTransfer(sender, receiver, None if sender == receiver else Crossing(share, dtype, wire))

    def _senders(self, receiver: int, num_rows: int, shape: Shape) -> range:
        """The processes whose shares contain rows that the receiver's devices hold."""
        rows = [
            index[0].indices(shape[0])
            for device, index in self.sharding.devices_indices_map(shape).items()
            if device.process_index == receiver and index is not None
        ]
        return range(min(start for start, _, _ in rows) // num_rows, -(-max(stop for _, stop, _ in rows) // num_rows))
