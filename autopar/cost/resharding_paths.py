"""Decompose a resharding into single collectives.

In: two `TensorSharding`s and the tensor. Out: moves, each one collective (or a cut, which is free) with the sharding
after it. The same moves are priced and executed. With one sharding constraint per move, XLA's SPMD partitioner
emits exactly these collectives; with the final constraint only, it may gather the whole tensor ("involuntary full
rematerialization").
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
    """One collective or cut of a resharding.

    Args:
        kind: change of sharding.
        axes: mesh axes that it runs over.
        result: sharding after it.
        num_bytes: payload on one device (see `cost.collectives`); 0 for a cut.
        is_inner: whether it gathers or scatters an inner dim (`is_inner`), which takes a copy.
    """

    kind: Change
    axes: tuple[str, ...]
    result: TensorSharding
    num_bytes: float
    is_inner: bool = False


def is_inner(dim: int, local_shape: Sequence[int]) -> bool:
    """Whether a gather or scatter of a dim needs a transposed copy of the tensor.

    A collective concatenates the devices' parts, which is the tensor's layout only for the outermost dim. The innermost
    dim needs no copy either, because a GEMM reads and writes a matrix in either layout.
    """
    return 0 < dim < len(local_shape) - 1 and math.prod(local_shape[:dim]) > 1


def rows_from_next(size: int, parts: int, of_each: int) -> int:
    """The rows that each device gets from the next one when each of a dim's parts is cut into more: padded to equal parts, they begin
    elsewhere. 0 if all begin where they did.

    >>> rows_from_next(258, 2, 4)  # parts of 129 rows become four of 33
    3
    """
    return (parts - 1) * (of_each * -(-size // (parts * of_each)) - -(-size // parts))


def num_scattered(source: TensorSharding, target: TensorSharding) -> int:
    """The number of dims that `target` splits along unreduced axes of `source`."""
    return sum(not set(source.unreduced).isdisjoint(axes) for axes in target.dims)


def resharding_moves(
    source: TensorSharding, target: TensorSharding, shape: tuple[int, ...], itemsize: float, mesh: MeshShape
) -> tuple[Move, ...]:
    """The moves from `source` to `target`; empty if they are equal.

    Pending reductions come first: a reduce-scatter for each dim that `target` splits along unreduced axes, an
    all-reduce along the others. Then follow cuts, which are free and shrink the tensor, all-to-alls between dims,
    permutes within dims, and all-gathers.
    """
    moves: list[Move] = []
    for step in resharding_steps(source, target, shape, mesh):
        local = step.padded_payload(shape, mesh)
        inner = step.dim is not None and is_inner(step.dim, local)
        moves.append(Move(step.kind, step.axes, step.result, itemsize * math.prod(local), inner))
    return tuple(moves)


@dataclass(frozen=True, slots=True)
class Step:
    """A move of a tensor of unspecified size.

    Args:
        payload: sharding whose local part is the payload; None for a cut.
        dim: dim that it gathers or scatters.
        to: dim to which an all-to-all moves the axis.
    """

    kind: Change
    axes: tuple[str, ...]
    result: TensorSharding
    payload: TensorSharding | None
    dim: int | None = None
    to: int | None = None

    def padded_payload(self, shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """The local shape of the payload. XLA pads the dim that one side splits more finely to equal parts."""
        if self.payload is None:
            return (0,)
        local, split = list(self.payload.local_shape(shape, mesh)), self.dim if self.to is None else self.to
        if split is not None:
            parts = mesh.sizes(self.axes)
            local[split] = parts * -(-shape[split] // (parts * mesh.sizes(self.payload.dims[split])))
        return tuple(local)


def resharding_steps(
    source: TensorSharding, target: TensorSharding, shape: tuple[int, ...], mesh: MeshShape
) -> tuple[Step, ...]:
    """The moves without their bytes. They depend on the shape only through `divisibility`."""
    if source == target:
        return ()
    assert not set(target.unreduced) - set(source.unreduced), "nothing makes a tensor unreduced again"
    path = _Path(source, target, shape, mesh)
    path.reduce()
    path.cut()
    path.exchange()
    path.reorder()
    path.gather()
    path.cut_late()
    path.reorder()
    assert path.now() == target, f"{source} -> {target} ended at {path.now()}"
    return tuple(path.steps)


def divisibility(shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
    """A canonical shape with the same `resharding_steps`.

    The steps depend only on whether products of distinct axes' sizes divide each dim.
    """
    return tuple(math.gcd(size, mesh.num_devices) for size in shape)


class _Path:
    """The current sharding between a source and a target, and the steps so far."""

    def __init__(self, source: TensorSharding, target: TensorSharding, shape: tuple[int, ...], mesh: MeshShape) -> None:
        self.target, self.shape, self.mesh = target, shape, mesh
        self.dims = [list(axes) for axes in source.dims]
        self.pending = [axis for axis in source.unreduced if axis not in target.unreduced]
        self.target_dim = {axis: d for d, axes in enumerate(target.dims) for axis in axes}
        self.whole = self._gathered_dims()
        self.steps: list[Step] = []

    def _gathered_dims(self) -> frozenset[int]:
        """The dims that an axis leaves or enters by an all-to-all, and that the axes before and after do not divide.

        Padded parts of such a dim begin elsewhere under each sharding, so XLA gathers both dims of the all-to-all instead. Only a
        whole dim is free to be split along one axis.
        """
        moves = [(d, to) for d, axes in enumerate(self.dims) for a in axes if (to := self.target_dim.get(a, d)) != d]
        touched = {d for move in moves for d in move}
        axes_of = {d: dict.fromkeys((*self.dims[d], *self.target.dims[d])) for d in touched}
        return frozenset(
            d for d, axes in axes_of.items() if len(axes) > 1 and self.shape[d] % self.mesh.sizes(tuple(axes))
        )

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
        """Record a step that led to the current sharding; its payload is split by `before`, or by the current one."""
        if axes:
            now = self.now()
            self.steps.append(Step(kind, tuple(axes), now, None if kind == "cut" else before or now, dim, to))

    def reduce(self) -> None:
        scattered: dict[int, list[str]] = {}
        for axis, dim in self.target_dim.items():
            if axis in self.pending:
                scattered.setdefault(dim, []).append(axis)
        for dim, axes in scattered.items():  # one dim each: for two dims at once XLA would all-reduce and cut
            before = self.now()
            self.dims[dim] += axes
            self.pending = [axis for axis in self.pending if axis not in axes]
            self.add("reduce-scatter", axes, before, dim)
        reduced, self.pending = self.pending, []
        self.add("all-reduce", reduced)

    def cut(self) -> None:
        """Split along new axes, but for those that wait until other axes have left their dim, which would not divide until then."""
        placed = {axis for axes in self.dims for axis in axes}
        new = [axis for axis in self.target_dim if axis not in placed]
        done = [axis for axis in new if self._divides_with(axis)]
        for axis in done:
            self.dims[self.target_dim[axis]].append(axis)
        self.add("cut", done)

    def _divides_with(self, axis: str) -> bool:
        d = self.target_dim[axis]
        if d in self.whole:
            return False
        leaving = [a for a in self.dims[d] if self.target_dim.get(a) != d]
        together = dict.fromkeys((*self.dims[d], *self.target.dims[d]))  # an axis in both counts once
        return not leaving or self.shape[d] % self.mesh.sizes(tuple(together)) == 0

    def exchange(self) -> None:
        moving = [
            (axis, d)
            for d, axes in enumerate(self.dims)
            for axis in axes
            if self.target_dim.get(axis, d) != d and self.whole.isdisjoint((d, self.target_dim[axis]))
        ]
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
        """Order the axes of each dim: those that stay, in the target's order, then those that leave."""
        disordered: list[str] = []
        for d, axes in enumerate(self.dims):
            if d in self.whole:  # it is gathered, and split in the target's order
                continue
            stay = [axis for axis in self.target.dims[d] if axis in axes]
            wanted = [*stay, *(axis for axis in axes if axis not in stay)]
            if wanted != axes:
                disordered += self.moved(axes, wanted)
                self.dims[d] = wanted
        self.add("collective-permute", disordered)

    def moved(self, before: list[str], after: list[str]) -> list[str]:
        """The mesh axes whose stride within a dim changes: a collective-permute over them reorders the dim."""

        def stride(axis: str, axes: list[str]) -> int:
            return self.mesh.sizes(tuple(axes[axes.index(axis) + 1 :]))

        return [axis for axis in after if stride(axis, before) != stride(axis, after)]

    def gather(self) -> None:
        for d in reversed(range(len(self.dims))):  # XLA gathers one dim at a time
            leaving = [axis for axis in self.dims[d] if d in self.whole or self.target_dim.get(axis) != d]
            self.dims[d] = [axis for axis in self.dims[d] if axis not in leaving]
            self.add("all-gather", leaving, dim=d)

    def cut_late(self) -> None:
        """Split along the axes that waited, and along those of the gathered dims."""
        placed = {axis for axes in self.dims for axis in axes}
        late = [axis for axis in self.target_dim if axis not in placed]
        for axis in late:
            self.dims[self.target_dim[axis]].append(axis)
        self.add("cut", late)
