"""What each device must fetch where tensors go from one sharding and mesh to another.

In: a tensor's shape, its sharding on one mesh, and that on another. Out: `Move`: elements that each device of the
second mesh holds, and those of them that it did not hold before. Device *n* of one mesh, counted row by row, is taken
for device *n* of the other; a device that the first mesh has not holds nothing before. Without JAX.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from autopar.mesh import MeshShape
from autopar.sharding import TensorSharding


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


@functools.lru_cache(maxsize=4096)
def move(
    shape: tuple[int, ...],
    before: TensorSharding,
    mesh_before: MeshShape,
    after: TensorSharding,
    mesh_after: MeshShape,
    shift: int = 0,
) -> Move:
    """From one sharding to another. Hundreds of tensors of a step share a few: each is worked out once.

    Args:
        shift: by how many devices the second mesh begins after the first.

    >>> data, whole = TensorSharding((("data",), ())), TensorSharding(((), ()))
    >>> move((8, 2), data, MeshShape(("data",), (4,)), data, MeshShape(("data",), (2,)))
    Move(held=(8, 8), fetched=(4, 8), same=False)
    >>> move((8, 2), whole, MeshShape(("data",), (4,)), data, MeshShape(("data",), (2,))).fetched
    (0, 0)
    """
    starts, stops = _parts(shape, before, mesh_before)
    new_starts, new_stops = _parts(shape, after, mesh_after)
    first, last = max(0, -shift), min(mesh_after.num_devices, mesh_before.num_devices - shift)
    own, old = slice(first, max(first, last)), slice(first + shift, max(first, last) + shift)  # devices of both
    overlap = np.minimum(stops[old], new_stops[own]) - np.maximum(starts[old], new_starts[own])
    held = np.prod(np.maximum(new_stops - new_starts, 0), axis=1, dtype=np.int64)
    fetched = held.copy()
    fetched[own] -= np.prod(np.maximum(overlap, 0), axis=1, dtype=np.int64)
    held_before = np.prod(np.maximum(stops - starts, 0), axis=1, dtype=np.int64)
    same = not fetched.any() and bool((held[own] == held_before[old]).all())  # a new device has fetched
    return Move(tuple(held.tolist()), tuple(fetched.tolist()), same)


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
