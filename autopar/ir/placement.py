"""What each device must fetch where tensors go from one sharding and mesh to another.

In: a tensor's shape, how it lies on one mesh, or in parts on several, and how on another. Out: `Move`: elements that each
device holds afterwards, and those of them that it did not hold before. Device *n* of one mesh, counted row by row, is taken
for device *n* of the other; a device that the first has not holds nothing before. Without JAX.
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
    """Elements by device of the second mesh.

    Args:
        held: what each holds afterwards.
        fetched: what of that it did not hold before.
        same: whether every device holds just what it held before.
    """

    held: tuple[int, ...]
    fetched: tuple[int, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Part:
    """How a tensor lies on a mesh, or some of its rows: dim, first, and the one after the last.

    Args:
        first_device: number of the mesh's first device.
    """

    sharding: TensorSharding
    mesh: MeshShape
    first_device: int = 0
    rows: tuple[int, int, int] | None = None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of these rows of a tensor."""
        if self.rows is None:
            return shape
        dim, start, stop = self.rows
        return (*shape[:dim], stop - start, *shape[dim + 1 :])


#: Where all of a tensor lies: its parts are on meshes that have no device in common.
Lies = tuple[Part, ...]


@functools.lru_cache(maxsize=4096)
def move(shape: tuple[int, ...], before: Lies, after: Lies) -> Move:
    """From one layout to another. Hundreds of tensors of a step share a few: each is worked out once.

    >>> data, whole = TensorSharding((("data",), ())), TensorSharding(((), ()))
    >>> four, two = MeshShape(("data",), (4,)), MeshShape(("data",), (2,))
    >>> move((8, 2), (Part(data, four),), (Part(data, two),))
    Move(held=(8, 8), fetched=(4, 8), same=False)
    >>> move((8, 2), (Part(whole, four),), (Part(data, two),)).fetched
    (0, 0)
    """
    starts, stops = _boxes(shape, before)
    new_starts, new_stops = _boxes(shape, after)
    both = min(len(starts), len(new_starts))
    overlap = np.minimum(stops[:both], new_stops[:both]) - np.maximum(starts[:both], new_starts[:both])
    kept = np.prod(np.maximum(overlap, 0), axis=1, dtype=np.int64)
    held = np.prod(np.maximum(new_stops - new_starts, 0), axis=1, dtype=np.int64)
    fetched = held.copy()
    fetched[:both] -= kept
    held_before = np.prod(np.maximum(stops - starts, 0), axis=1, dtype=np.int64)
    same = not fetched.any() and bool((held[:both] == held_before[:both]).all())  # a new device has fetched
    return Move(tuple(held.tolist()), tuple(fetched.tolist()), same)


def _boxes(shape: tuple[int, ...], lies: Lies) -> tuple[np.ndarray, np.ndarray]:
    """Where the part of each device up to the last one starts and stops; of one that holds nothing, at 0."""
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
    """Where each device's part starts and stops: two arrays of devices x dims."""
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
