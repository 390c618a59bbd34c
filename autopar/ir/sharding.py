"""How one tensor is split over a mesh: `TensorSharding`, the value every later pass speaks.

In: mesh axis names. Out: local shapes, local bytes, text. No devices and no JAX.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """Per dim the mesh axes that split it, major first; and the axes along which it is unreduced.

    A tensor is replicated along every axis named in neither. Along an unreduced axis each device
    holds one term of a sum (or of a max, a min …) that is still to be taken.
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
        """The same split, with every pending reduction taken."""
        return TensorSharding(self.dims) if self.unreduced else self

    def without(self, pending: tuple[str, ...]) -> TensorSharding:
        """The same split, with no reduction pending along these axes."""
        if not any(axis in pending for axis in self.unreduced):
            return self
        return TensorSharding(self.dims, tuple(axis for axis in self.unreduced if axis not in pending))

    def local_shape(self, global_shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """Shape on one device; a dim that does not divide is padded up, as XLA does."""
        dims = zip(global_shape, self.dims, strict=True)
        return tuple([-(-size // mesh.sizes(axes)) if axes else size for size, axes in dims])

    def local_size(self, global_shape: tuple[int, ...], mesh: MeshShape) -> int:
        """Elements on one device."""
        return math.prod(self.local_shape(global_shape, mesh))

    def divides(self, global_shape: tuple[int, ...], mesh: MeshShape) -> bool:
        """Whether every split dim divides evenly; inputs and outputs of `jax.jit` must."""
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
    """Whole on every device."""
    return TensorSharding(((),) * num_dims)
