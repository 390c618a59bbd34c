"""Choose the sharding in which a value passes from one stage to another.

In: a value's shape, and its planned sharding on the sender's and on the receiver's mesh.
Out: the `Split` that it has on either side while it passes. The executor reshards by it, and the search prices that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A sharding on a mesh of some devices, in row-major order."""

    mesh: MeshShape
    sharding: TensorSharding

    def num_parts(self, shape: Shape) -> int:
        """The number of different parts of a value; 0 if it is empty."""
        return math.prod(shape) // max(1, self.sharding.local_size(shape, self.mesh))


def wire_between(shape: Shape, source: Split, target: Split) -> tuple[Split, Split]:
    """The equal splits of a value on the sender's and on the receiver's devices while it passes.

    Between submeshes of equal size, the value is sent with the finer of the two shardings: the sender slices it, or the
    receiver gathers it. Between other submeshes, it is sent in as many parts as the greatest common divisor of both
    sizes.
    """
    senders, receivers = source.mesh.num_devices, target.mesh.num_devices
    if senders == receivers:
        finer = target if target.num_parts(shape) >= source.num_parts(shape) else source
        return finer, finer
    parts = math.gcd(senders, receivers)
    dim = _split_dim(shape, parts, (target.sharding, source.sharding))
    sharding = TensorSharding(tuple(("part",) if d == dim else () for d in range(len(shape))))
    here, there = (
        Split(MeshShape(("part", "copy"), (parts, size // parts)), sharding) for size in (senders, receivers)
    )
    return here, there


def even_part(sharding: TensorSharding, shape: Shape, mesh: MeshShape) -> TensorSharding:
    """The sharding of those dims that it divides evenly, as an array has between stages."""
    if len(sharding.dims) != len(shape):  # PRNG keys, sharded by their raw numbers
        return sharding
    dims = zip(shape, sharding.dims, strict=True)
    return TensorSharding(tuple(axes if size % mesh.sizes(axes) == 0 else () for size, axes in dims))


def _split_dim(shape: Shape, parts: int, like: Sequence[TensorSharding]) -> int | None:
    """The dim to split into parts: one that either sharding splits, else the first that is divisible."""
    divides = [dim for dim, size in enumerate(shape) if size and size % parts == 0]
    if parts == 1 or not divides:
        return None
    split = [dim for one in like for dim, axes in enumerate(one.dims) if axes]
    return next((dim for dim in split if dim in divides), divides[0])
