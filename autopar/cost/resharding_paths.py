"""Which collectives turn one sharding of a tensor into another, one at a time.

In: two `TensorSharding`s and the tensor. Out: moves, each one collective (or a cut, which is free)
with the sharding it leads to. They are what is priced and what is executed: told one move at a time,
XLA's partitioner takes exactly these; told only the end, it may gather the whole tensor
("involuntary full rematerialization").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.ir.sharding_changes import Change


@dataclass(frozen=True, slots=True)
class Move:
    """One step: its kind, the axes it runs over, where it leads, and its payload in bytes on one
    device (see `cost.collectives`); a cut moves nothing.

    Args:
        is_inner: it gathers or scatters a dim that others are around (`is_inner`).
    """

    kind: Change
    axes: tuple[str, ...]
    result: TensorSharding
    num_bytes: float
    is_inner: bool = False


def is_inner(dim: int, local_shape: Sequence[int]) -> bool:
    """Whether to gather or scatter a dim takes a copy of the tensor in another order: devices' parts lie one after another,
    which is the order of the tensor only where the dim is its outermost. The innermost may be that as well: a product reads
    and writes a matrix either way."""
    return 0 < dim < len(local_shape) - 1 and math.prod(local_shape[:dim]) > 1


def resharding_moves(
    source: TensorSharding, target: TensorSharding, shape: tuple[int, ...], itemsize: float, mesh: MeshShape
) -> tuple[Move, ...]:
    """The moves from `source` to `target`; none where they are equal.

    A pending reduction comes first: a reduce-scatter for each dim that `target` splits along pending
    axes, an all-reduce along the rest. Then cuts (free, and they make the rest smaller), exchanges between
    dims, reordering within dims, and gathers.
    """
    moves: list[Move] = []
    for step in resharding_steps(source, target, shape, mesh):
        local = step.payload.local_shape(shape, mesh) if step.payload else (0,)
        inner = step.dim is not None and is_inner(step.dim, local)
        moves.append(Move(step.kind, step.axes, step.result, itemsize * math.prod(local), inner))
    return tuple(moves)


@dataclass(frozen=True, slots=True)
class Step:
    """A move of a tensor of any size: its payload is the local part of the tensor so split (None: nothing); `dim` is what
    it gathers or scatters, `to` where an exchange leads."""

    kind: Change
    axes: tuple[str, ...]
    result: TensorSharding
    payload: TensorSharding | None
    dim: int | None = None
    to: int | None = None


def resharding_steps(
    source: TensorSharding, target: TensorSharding, shape: tuple[int, ...], mesh: MeshShape
) -> tuple[Step, ...]:
    """The moves without their bytes. Of the shape it matters only which numbers of devices divide each dim
    (`divisibility`)."""
    if source == target:
        return ()
    assert not set(target.unreduced) - set(source.unreduced), "nothing makes a tensor unreduced again"
    path = _Path(source, target, shape, mesh)
    path.reduce()
    late = path.cut()
    path.exchange()
    path.reorder()
    path.gather()
    path.cut_late(late)
    path.reorder()
    assert path.now() == target, f"{source} -> {target} ended at {path.now()}"
    return tuple(path.steps)


def divisibility(shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
    """What `resharding_steps` may know of a shape, and a shape that it treats alike: it asks of a dim whether products
    of axis sizes divide it, in which an axis stands once."""
    return tuple(math.gcd(size, mesh.num_devices) for size in shape)


class _Path:
    """A sharding on its way from one to another."""

    def __init__(self, source: TensorSharding, target: TensorSharding, shape: tuple[int, ...], mesh: MeshShape) -> None:
        self.target, self.shape, self.mesh = target, shape, mesh
        self.dims = [list(axes) for axes in source.dims]
        self.pending = [axis for axis in source.unreduced if axis not in target.unreduced]
        self.target_dim = {axis: d for d, axes in enumerate(target.dims) for axis in axes}
        self.steps: list[Step] = []

    def now(self) -> TensorSharding:
        return TensorSharding(tuple(map(tuple, self.dims)), (*self.target.unreduced, *self.pending))

    def add(
        self,
        kind: Change,
        axes: list[str],
        before: TensorSharding | None = None,
        dim: int | None = None,
        to: int | None = None,
    ) -> None:
        """Note a step that led here; its payload is as much as there is now, unless `before` says otherwise."""
        if axes:
            now = self.now()
            self.steps.append(Step(kind, tuple(axes), now, None if kind == "cut" else before or now, dim, to))

    def reduce(self) -> None:
        scattered: dict[int, list[str]] = {}
        for axis, dim in self.target_dim.items():
            if axis in self.pending:
                scattered.setdefault(dim, []).append(axis)
        for dim, axes in scattered.items():  # to two dims at once XLA sums whole, and cuts
            before = self.now()
            self.dims[dim] += axes
            self.pending = [axis for axis in self.pending if axis not in axes]
            self.add("reduce-scatter", axes, before, dim)
        reduced, self.pending = self.pending, []
        self.add("all-reduce", reduced)

    def cut(self) -> list[str]:
        """Split along new axes; returns those that must wait, because the dim would not divide while
        axes that are to leave still split it."""
        placed = {axis for axes in self.dims for axis in axes}
        new = [axis for axis in self.target_dim if axis not in placed]
        late = [axis for axis in new if not self._divides_with(axis)]
        done = [axis for axis in new if axis not in late]
        for axis in done:
            self.dims[self.target_dim[axis]].append(axis)
        self.add("cut", done)
        return late

    def _divides_with(self, axis: str) -> bool:
        d = self.target_dim[axis]
        leaving = [a for a in self.dims[d] if self.target_dim.get(a) != d]
        together = dict.fromkeys((*self.dims[d], *self.target.dims[d]))  # one that stays splits it once
        return not leaving or self.shape[d] % self.mesh.sizes(tuple(together)) == 0

    def exchange(self) -> None:
        moving = [(axis, d) for d, axes in enumerate(self.dims) for axis in axes if self.target_dim.get(axis, d) != d]
        for axis, d in moving:
            if self.dims[d][-1] != axis:  # only the minor-most axis can leave a dim
                wanted = [*(a for a in self.dims[d] if a != axis), axis]
                moved = self.moved(self.dims[d], wanted)
                self.dims[d] = wanted
                self.add("collective-permute", moved)
            before = self.now()
            self.dims[d].pop()
            self.dims[self.target_dim[axis]].append(axis)
            self.add("all-to-all", [axis], before, to=self.target_dim[axis])

    def reorder(self) -> None:
        """Within each dim: what stays in the target's order, then what is to leave."""
        disordered: list[str] = []
        for d, axes in enumerate(self.dims):
            stay = [axis for axis in self.target.dims[d] if axis in axes]
            wanted = [*stay, *(axis for axis in axes if axis not in stay)]
            if wanted != axes:
                disordered += self.moved(axes, wanted)
                self.dims[d] = wanted
        self.add("collective-permute", disordered)

    def moved(self, before: list[str], after: list[str]) -> list[str]:
        """Axes along which devices exchange parts of a dim for another order: those whose stride in it changes."""

        def stride(axis: str, axes: list[str]) -> int:
            return self.mesh.sizes(tuple(axes[axes.index(axis) + 1 :]))

        return [axis for axis in after if stride(axis, before) != stride(axis, after)]

    def gather(self) -> None:
        for d in reversed(range(len(self.dims))):  # XLA gathers one dim at a time
            leaving = [axis for axis in self.dims[d] if axis not in self.target_dim]
            self.dims[d] = [axis for axis in self.dims[d] if axis in self.target_dim]
            self.add("all-gather", leaving, dim=d)

    def cut_late(self, late: list[str]) -> None:
        for axis in late:
            self.dims[self.target_dim[axis]].append(axis)
        self.add("cut", late)
