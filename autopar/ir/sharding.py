"""Define the sharding of a tensor over a mesh, without devices and without JAX.

In: mesh axis names. Out: `TensorSharding`, with local shapes, local sizes and text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """The mesh axes that split each dim, major first, and the axes along which the tensor is unreduced.

    A tensor is replicated along all other axes. Along an unreduced axis each device holds one term of a pending
    reduction (a sum, max, min …).
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        """Axes that split some dim."""
        return frozenset(axis for dim in self.dims for axis in dim)

    @property
    def is_replicated(self) -> bool:
        return not self.unreduced and not any(self.dims)

    def resolved(self) -> TensorSharding:
        """The same sharding without pending reductions."""
        return TensorSharding(self.dims) if self.unreduced else self

    def without(self, pending: tuple[str, ...]) -> TensorSharding:
        """The same sharding without pending reductions along these axes."""
        if not any(axis in pending for axis in self.unreduced):
            return self
        return TensorSharding(self.dims, tuple(axis for axis in self.unreduced if axis not in pending))

    def local_shape(self, global_shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """Shape on one device; a dim that does not divide evenly is padded, as XLA does."""
        dims = zip(global_shape, self.dims, strict=True)
        return tuple([-(-size // mesh.sizes(axes)) if axes else size for size, axes in dims])

    def local_size(self, global_shape: tuple[int, ...], mesh: MeshShape) -> int:
        """Number of elements on one device."""
        return math.prod(self.local_shape(global_shape, mesh))

    def divides(self, global_shape: tuple[int, ...], mesh: MeshShape) -> bool:
        """Whether every split dim divides evenly, as `jax.jit` requires of inputs and outputs."""
        return all(size % mesh.sizes(axes) == 0 for size, axes in zip(global_shape, self.dims, strict=True))

    def __str__(self) -> str:
        def one(axes: tuple[str, ...]) -> str:
            if not axes:
                return "None"
            if len(axes) == 1:
                return repr(axes[0])
            return "(" + ", ".join(map(repr, axes)) + ")"

        used = len(self.dims)
        while used and not self.dims[used - 1]:
            used -= 1
        text = "P(" + ", ".join(one(axes) for axes in self.dims[:used]) + ")"
        return text + (f" unreduced over {', '.join(self.unreduced)}" if self.unreduced else "")


def replicated(num_dims: int) -> TensorSharding:
    """The replicated sharding of a tensor."""
    return TensorSharding(((),) * num_dims)
