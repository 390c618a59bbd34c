"""Find a state's shards, and make arrays in any other sharding of their copies.

In: arrays by path. Out: this process's shards, each once among all processes, with an index of where they are in the bytes of all. The
inverse reads the shards of all processes, from whichever agents have them, and only those that a device needs. Where the boxes of
shards are is all that counts: stages of a pipeline are found by it, as parts of an array that one program shards.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import CheckpointError, ProcessError
from autopar.membership.records import Restore
from autopar.membership.wire import Connection
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.run.stacked_leaves import StackedLeaf

#: A range of each dim.
Box = tuple[tuple[int, int], ...]
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of this process.

    Args:
        path, shape, dtype: of the whole array.
        box: where the shard is in it.
        data: on one device, or on the host.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    data: Any


def shards_of(arrays: Mapping[str, Any], is_first: bool) -> list[Shard]:
    """This process's shards, each of which no other process has in its list.

    Args:
        is_first: whether this is process 0, which has what every process has.
    """
    return [
        Shard(path, tuple(array.shape), str(array.dtype), box, data)
        for path, array in arrays.items()
        for box, data in _parts(array, is_first)
    ]


def in_bytes(shards: Sequence[Shard]) -> tuple[list[Any], list[np.ndarray]]:
    """The index of shards, and their bytes on the host. It waits for the devices."""
    index, data, start = [], [], 0
    for one in shards:
        own = np.ascontiguousarray(one.data).reshape(-1).view(np.uint8)
        index.append([one.path, list(one.shape), one.dtype, one.box, start, own.nbytes, zlib.crc32(own)])
        data.append(own)
        start += own.nbytes
    return index, data


def _parts(array: Any, is_first: bool) -> list[tuple[Box, Any]]:
    if isinstance(array, StackedLeaf):
        return [(_moved(box, rows), data) for rows, part in array.parts.items() for box, data in _parts(part, is_first)]
    if not isinstance(array, jax.Array):
        return [(_box((), array.shape), array)] if is_first else []
    return [(_box(shard.index, array.shape), shard.data) for shard in array.addressable_shards if shard.replica_id == 0]


def _moved(box: Box, rows: Rows) -> Box:
    """A box of some layers of an array, in the whole array."""
    return tuple(
        (start + rows.start, stop + rows.start) if dim == rows.dim else (start, stop)
        for dim, (start, stop) in enumerate(box)
    )


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(one.indices(size)[:2] for one, size in zip(slices, shape, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard in some agent's memory."""

    owner: int
    box: Box
    start: int
    size: int
    crc: int


@dataclass(slots=True)
class PeerCopies:
    """The shards of one step, in the memory of agents.

    Args:
        token: the job's.
    """

    restore: Restore
    token: str
    kinds: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    num_bytes: int = 0
    _connections: dict[str, Connection] = field(default_factory=dict)

    def read_index(self) -> None:
        """Read which shards there are.

        Raises:
            ProcessError: no agent has the copies of a worker any more, or what it has is no index of shards.
        """
        for owner in range(len(self.restore.sources)):
            index: Any = self._request(owner, {"call": "index"})[0].get("index")
            try:
                for path, shape, dtype, box, start, size, crc in index:
                    piece = Piece(owner, tuple((int(a), int(b)) for a, b in box), int(start), int(size), int(crc))
                    _check_piece(piece, shape, dtype)
                    self.kinds[str(path)] = tuple(shape), str(dtype)
                    self.pieces.setdefault(str(path), []).append(piece)
            except (TypeError, ValueError) as error:
                raise ProcessError(
                    f"the index of the shards of worker {owner}, of step {self.restore.step}, is damaged: {error}"
                ) from error

    def array(self, path: str, wanted: Any, rows: Rows | None = None) -> Any:
        """An array of these shards.

        Args:
            wanted: the shape and dtype of the whole array, and the sharding.
            rows: the layers of which the array is to be; None for all.

        Raises:
            CheckpointError: the copies have no such array, or another kind.
            ProcessError: agents have died, or a shard is damaged in all of them.
        """
        kind = (tuple(wanted.shape), str(wanted.dtype))
        if self.kinds.get(path) != kind:
            there = f"{self.kinds[path]}" if path in self.kinds else "missing"
            raise CheckpointError(
                f"the copies in the memory of peers are of another state: `{path}` is {there} there, {kind} here. Every member must run"
                " the same program"
            )
        read: dict[Piece, np.ndarray] = {}

        shape = wanted.shape if rows is None else rows.shape_of(wanted.shape)

        def at(index: Sequence[slice] | None) -> np.ndarray:
            box = _box(index or (), shape)
            box = box if rows is None else _moved(box, rows)
            made = np.empty([stop - start for start, stop in box], jnp.dtype(wanted.dtype))
            found = 0
            for piece in self.pieces[path]:
                common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.box, strict=True)]
                if any(start >= stop for start, stop in common):
                    continue
                if piece not in read:
                    of_piece = [stop - start for start, stop in piece.box]
                    read[piece] = self._data(path, piece).view(made.dtype).reshape(of_piece)
                made[_within(common, box)] = read[piece][_within(common, piece.box)]
                found += math.prod(stop - start for start, stop in common)
            if found != made.size:
                raise CheckpointError(
                    f"the copies in the memory of peers have {found} of {made.size} elements of a part of `{path}`: a worker did not send"
                    " all of its shards"
                )
            return made

        return jax.make_array_from_callback(shape, wanted.sharding, at, dtype=wanted.dtype)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    def _data(self, path: str, piece: Piece) -> np.ndarray:
        data = np.frombuffer(
            self._request(
                piece.owner, {"call": "get", "start": piece.start, "stop": piece.start + piece.size}, piece.crc
            )[1],
            np.uint8,
        )
        self.num_bytes += data.nbytes
        return data

    def _request(self, owner: int, call: dict[str, Any], crc: int | None = None) -> tuple[dict[str, Any], bytearray]:
        """Ask the agents that have a worker's copy, one after another. A damaged copy is dropped."""
        generation, step, sources = self.restore.generation, self.restore.step, self.restore.sources
        copy = [generation, step, owner, len(sources)]
        for address in sources[owner]:
            try:
                if address not in self._connections:
                    self._connections[address] = Connection.to(
                        address, {"token": self.token, "call": "copies"}, _TIMEOUT_S
                    )
                connection = self._connections[address]
                connection.send({**call, "copy": copy})
                answer, data = connection.receive()
                if "missing" in answer:
                    continue
                if crc is None or zlib.crc32(data) == crc:
                    return answer, data
                connection.send({"call": "drop", "copy": copy})
                connection.receive()
            except OSError:
                self._connections.pop(address, None)
        raise ProcessError(
            f"no peer has the shards of worker {owner} of generation {generation} at step {step} any more, undamaged"
        )


def _check_piece(piece: Piece, shape: Sequence[int], dtype: str) -> None:
    """Refuse a shard that cannot be.

    Raises:
        ValueError, TypeError: its box is not in the array, or has another number of bytes.
    """
    is_inside = len(piece.box) == len(shape) and all(
        0 <= a <= b <= size for (a, b), size in zip(piece.box, shape, strict=True)
    )
    num_bytes = math.prod(b - a for a, b in piece.box) * jnp.dtype(dtype).itemsize
    if not is_inside or piece.start < 0 or piece.size != num_bytes:
        raise ValueError(f"a shard {piece.box} of {piece.size} bytes is none of {dtype}{list(shape)}")


def _within(common: Sequence[tuple[int, int]], box: Box) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, box, strict=True))
