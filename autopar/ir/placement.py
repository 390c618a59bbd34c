"""Compute what each device fetches when a tensor moves from one sharding and mesh to another.

In: a tensor's shape, its sharding on one mesh, or in parts on several meshes, and its sharding on another. Out: `Move`:
the number of elements that each device holds afterwards, and how many of them it did not hold before. Device *n* of
one mesh, counted row-major, is device *n* of the other; a device that the first mesh lacks holds nothing before.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Move:
    """Element counts per device of the second mesh.

    Args:
        held: elements that each device holds afterwards.
        fetched: elements of these that it did not hold before.
        same: whether every device holds exactly the elements that it held before.
    """

    held: tuple[int, ...]
    fetched: tuple[int, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Part:
    """The sharding of a tensor, or of a slice of it, on a mesh.

    Args:
        sharding: sharding on the mesh.
        mesh: shape of the mesh.
        first_device: number of the mesh's first device.
        rows: slice of the tensor as (dim, start, stop); None for the whole tensor.
    """

    sharding: TensorSharding
    mesh: MeshShape
    first_device: int = 0
    rows: tuple[int, int, int] | None = None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this slice of a tensor of shape `shape`."""
        if self.rows is None:
            return shape
        dim, start, stop = self.rows
        return (*shape[:dim], stop - start, *shape[dim + 1 :])


#: The layout of a whole tensor: its parts, on meshes without common devices.
Parts = tuple[Part, ...]


@functools.lru_cache(maxsize=4096)
def move(shape: tuple[int, ...], before: Parts, after: Parts) -> Move:
    """The move from one layout to another, cached because the tensors of a step share few of them.

    >>> data, whole = TensorSharding((("data",), ())), TensorSharding(((), ()))
    >>> four, two = MeshShape(("data",), (4,)), MeshShape(("data",), (2,))
    >>> move((8, 2), (Part(data, four),), (Part(data, two),))
    Move(held=(8, 8), fetched=(4, 8), same=False)
    >>> move((8, 2), (Part(whole, four),), (Part(data, two),)).fetched
    (0, 0)
    """
    starts, stops = boxes(shape, before)
    new_starts, new_stops = boxes(shape, after)
    both = min(len(starts), len(new_starts))
    overlap = np.minimum(stops[:both], new_stops[:both]) - np.maximum(starts[:both], new_starts[:both])
    kept = np.prod(np.maximum(overlap, 0), axis=1, dtype=np.int64)
    held = np.prod(np.maximum(new_stops - new_starts, 0), axis=1, dtype=np.int64)
    fetched = held.copy()
    fetched[:both] -= kept
    held_before = np.prod(np.maximum(stops - starts, 0), axis=1, dtype=np.int64)
    same = not fetched.any() and bool((held[:both] == held_before[:both]).all())  # a new device always fetches
    return Move(tuple(held.tolist()), tuple(fetched.tolist()), same)


def boxes(shape: tuple[int, ...], lies: Parts) -> tuple[np.ndarray, np.ndarray]:
    """The start and stop of each device's part, [devices, dims]; both are 0 for a device that holds nothing."""
    num_devices = max(part.first_device + part.mesh.num_devices for part in lies)
    starts, stops = (np.zeros((num_devices, max(len(shape), 1)), np.int64) for _ in range(2))
    for part in lies:
        own = slice(part.first_device, part.first_device + part.mesh.num_devices)
        size = part.shape_of(shape)
        first, last = _parts(size, part.sharding, part.mesh)
        if part.rows is not None:
            first[:, part.rows[0]] += part.rows[1]
            last[:, part.rows[0]] += part.rows[1]
        if not shape:
            first, last = np.zeros((len(first), 1), np.int64), np.ones((len(first), 1), np.int64)
        starts[own], stops[own] = first, last
    return starts, stops


def _parts(shape: tuple[int, ...], sharding: TensorSharding, mesh: MeshShape) -> tuple[np.ndarray, np.ndarray]:
    """The start and stop of each device's part on one mesh: two arrays [devices, dims]."""
    coordinates = dict(
        zip(mesh.axis_names, np.unravel_index(np.arange(mesh.num_devices), mesh.axis_sizes), strict=True)
    )
    starts = np.zeros((mesh.num_devices, len(shape)), np.int64)
    stops = np.broadcast_to(np.array(shape, np.int64), starts.shape).copy()
    for dim, (size, axes) in enumerate(zip(shape, sharding.dims, strict=True)):
        if not axes:
            continue
        part = np.zeros(mesh.num_devices, np.int64)
        for axis in axes:  # major first
            part = part * mesh.size(axis) + coordinates[axis]
        local = math.ceil(size / mesh.sizes(axes))
        starts[:, dim] = np.minimum(part * local, size)
        stops[:, dim] = np.minimum((part + 1) * local, size)
    return starts, stops
