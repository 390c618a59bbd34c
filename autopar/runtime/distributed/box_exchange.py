"""Give arrays other devices, and add up what several groups of devices have of one.

In: `Moved` values: the shardings in which each of several sources has a value, and the sharding that is wanted. Out: `BoxExchange`, whose call
returns each value as it is wanted, the sources combined in their order. A source may be on some of the devices only. Each device packs what
others need of its shards, one program over all devices permutes the packed bytes, and each device makes its part of what arrived.
Exactly the bytes that a device lacks are sent, in messages that are padded to the largest of their round.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.runtime.distributed.routes import Box, Held, Message, Piece, Router, rounds_of, volume, within

_AXIS = "device"

#: An array of which a value consists, and the box of the value that it is.
Part = tuple[NamedSharding, Box]


@dataclass(frozen=True, slots=True)
class Moved:
    """A value that gets another sharding.

    Args:
        shape, dtype: of the whole value.
        sources: for each source, the arrays of which the value consists there.
        wanted: the array that is wanted: its sharding, and the box of the value that it is.
        combine: how the sources are combined; None takes the only one.
    """

    shape: tuple[int, ...]
    dtype: Any
    sources: tuple[tuple[Part, ...], ...]
    wanted: Part
    combine: Callable[[Any, Any], Any] | None = None


class BoxExchange:
    """Moves values, in one order on all processes.

    Args:
        devices: all devices that have or get something.

    Attributes:
        num_bytes: that pass between devices in a call, without padding.
    """

    def __init__(self, devices: Sequence[Any], values: Sequence[Moved]) -> None:
        self._devices, self._values = tuple(devices), tuple(values)
        number = {device: n for n, device in enumerate(devices)}
        router = Router([device.process_index for device in devices])
        pieces = [
            piece
            for n, value in enumerate(values)
            for source, parts in enumerate(value.sources)
            for piece in router.pieces(
                *(n, source, _held(parts, number), _boxes(value.wanted, number)), np.dtype(value.dtype).itemsize
            )
        ]
        self._wanted = [_boxes(value.wanted, number) for value in values]
        self._own: defaultdict[int, list[Piece]] = defaultdict(list)
        sent: defaultdict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in pieces:
            ends = piece.held.device, piece.target
            (self._own[piece.target] if ends[0] == ends[1] else sent[ends]).append(piece)
        messages: list[Message] = [
            (*ends, of, sum(self._num_bytes(piece) for piece in of)) for ends, of in sorted(sent.items())
        ]
        self._rounds = rounds_of(messages)
        self._lengths = [max(message[3] for message in one) for one in self._rounds]
        self.num_bytes = sum(message[3] for message in messages)
        here = jax.process_index()
        self._local = [n for n, device in enumerate(devices) if device.process_index == here]
        mesh = Mesh(np.array(self._devices, dtype=object), (_AXIS,), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
        self._pack = {n: self._packing(n) for n in self._local}
        self._unpack = {n: self._unpacking(n) for n in self._local}
        self._permute = self._permuting(mesh)

    def __call__(self, given: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
        """Move values.

        Args:
            given: for each value and source, its arrays.
        """
        shards = [
            [[{shard.device: shard.data for shard in array.addressable_shards} for array in arrays] for arrays in one]
            for one in given
        ]

        def taken(pieces: Sequence[tuple[int, int, int]], device: int) -> list[Any]:
            return [shards[value][source][array][self._devices[device]] for value, source, array in pieces]

        arrived: list[Any] = []
        if self._rounds:
            packed = [self._pack[n][1](*taken(self._pack[n][0], n)) for n in self._local]
            size = len(self._devices)
            buffers = [
                jax.make_array_from_single_device_arrays((size * length,), self._sharding, [one[r] for one in packed])
                for r, length in enumerate(self._lengths)
            ]
            arrived = [
                {shard.device: shard.data for shard in buffer.addressable_shards} for buffer in self._permute(*buffers)
            ]
        made: list[list[Any]] = [[] for _ in self._values]
        for n in self._local:
            read, rounds, unpack = self._unpack[n]
            values = unpack([arrived[r][self._devices[n]] for r in rounds], taken(read, n))
            for value, array in values.items():
                made[value].append(array)
        return [
            jax.make_array_from_single_device_arrays(
                _shape(value.wanted[1]), value.wanted[0], arrays, dtype=value.dtype
            )
            for value, arrays in zip(self._values, made, strict=True)
        ]

    # -- programs ----------------------------------------------------------------------------

    def _packing(self, device: int) -> tuple[list[tuple[int, int, int]], Any]:
        """What a device reads to pack its messages, and the program: the bytes of each round, padded."""
        of_round: list[Sequence[Piece]] = [
            next((message[2] for message in one if message[0] == device), ()) for one in self._rounds
        ]
        reads = list(dict.fromkeys(_array(piece) for pieces in of_round for piece in pieces))

        def pack(*arrays: Any) -> list[Any]:
            shard = dict(zip(reads, arrays, strict=True))
            found: list[Any] = []
            for pieces, length in zip(of_round, self._lengths, strict=True):
                parts = [_as_bytes(shard[_array(piece)][within(piece.box, piece.held.box)]) for piece in pieces]
                parts.append(jnp.zeros(length - sum(map(self._num_bytes, pieces)), jnp.uint8))
                found.append(jnp.concatenate(parts))
            return found

        place = jax.sharding.SingleDeviceSharding(self._devices[device])
        return reads, jax.jit(pack, out_shardings=place)

    def _unpacking(self, device: int) -> tuple[list[tuple[int, int, int]], list[int], Any]:
        """What a device reads besides, the rounds in which something arrives, and the program: its part of each value."""
        own = self._own[device]
        reads = list(dict.fromkeys(map(_array, own)))
        arriving = {r: message[2] for r, one in enumerate(self._rounds) for message in one if message[1] == device}

        def unpack(buffers: Sequence[Any], arrays: Sequence[Any]) -> dict[int, Any]:
            shard = dict(zip(reads, arrays, strict=True))
            pieces: defaultdict[tuple[int, int], list[tuple[Box, Any]]] = defaultdict(list)
            for piece in own:
                data = shard[_array(piece)][within(piece.box, piece.held.box)]
                pieces[piece.value, piece.source].append((piece.box, data))
            for buffer, sent in zip(buffers, arriving.values(), strict=True):
                start = 0
                for piece in sent:
                    stop = start + self._num_bytes(piece)
                    data = _from_bytes(buffer[start:stop], _shape(piece.box), self._values[piece.value].dtype)
                    pieces[piece.value, piece.source].append((piece.box, data))
                    start = stop
            return {
                n: self._combined(n, wanted[device], pieces)
                for n, wanted in enumerate(self._wanted)
                if device in wanted
            }

        place = jax.sharding.SingleDeviceSharding(self._devices[device])
        return reads, list(arriving), jax.jit(unpack, out_shardings=place)

    def _combined(self, n: int, box: Box, pieces: Mapping[tuple[int, int], Sequence[tuple[Box, Any]]]) -> Any:
        """A device's part of a value, of the pieces of all sources."""
        value = self._values[n]
        parts = [_of_pieces(box, pieces[n, source], value.dtype) for source in range(len(value.sources))]
        if value.combine is None:
            return parts[0]
        return functools.reduce(value.combine, parts)

    def _permuting(self, mesh: Mesh) -> Any:
        pairs = [[message[:2] for message in one] for one in self._rounds]

        def permute(*buffers: Any) -> tuple[Any, ...]:
            return tuple(lax.ppermute(one, _AXIS, of) for one, of in zip(buffers, pairs, strict=True))

        specs = (PartitionSpec(_AXIS),) * len(pairs)
        return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=specs, out_specs=specs))

    def _num_bytes(self, piece: Piece) -> int:
        return piece.size * np.dtype(self._values[piece.value].dtype).itemsize


def box_of(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def _held(parts: Sequence[Part], number: Mapping[Any, int]) -> list[Held]:
    return [Held(device, box, n) for n, part in enumerate(parts) for device, box in _boxes(part, number).items()]


def _boxes(part: Part, number: Mapping[Any, int]) -> dict[int, Box]:
    """The box of the value that each device has of an array."""
    sharding, outer = part
    shape = _shape(outer)
    return {
        number[device]: tuple(
            (start + first, start + last)
            for (start, _), (first, last, _) in zip(
                outer, (one.indices(size) for one, size in zip(index, shape, strict=True)), strict=True
            )
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _array(piece: Piece) -> tuple[int, int, int]:
    return piece.value, piece.source, piece.held.array


def _of_pieces(box: Box, pieces: Sequence[tuple[Box, Any]], dtype: Any) -> Any:
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    made = jnp.zeros(_shape(box), dtype)
    for part, data in pieces:
        made = made.at[within(part, box)].set(data)
    return made


def _as_bytes(array: Any) -> Any:
    flat = lax.reshape(array, (array.size,))
    flat = flat.astype(jnp.uint8) if flat.dtype == jnp.bool_ else flat
    return lax.reshape(lax.bitcast_convert_type(flat, jnp.uint8), (array.size * array.dtype.itemsize,))


def _from_bytes(data: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    dtype = np.dtype(dtype)
    size = volume(box_of(shape))
    if dtype == np.bool_:
        return lax.reshape(data.astype(jnp.bool_), shape)
    apart = lax.reshape(data, (size, dtype.itemsize)) if dtype.itemsize > 1 else data
    return lax.reshape(lax.bitcast_convert_type(apart, dtype), shape)
