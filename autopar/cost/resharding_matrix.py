"""Predict the time of every resharding between two lists of shardings, vectorized.

In: the shardings of a tensor's producer, the shardings that its users need, the tensor's shape and bytes. Out: a matrix
of seconds.

The steps from one sharding to another (`resharding_steps`) depend neither on the dtype nor on dims that neither side
splits. The rest is a *pattern*. A mesh has few patterns, and the steps of each are found once. The matrix is then
arithmetic on arrays: the bytes that each step moves per pair, and the time of each distinct collective.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.cost.collectives import cheaper_than_built_in, collective_time
from autopar.cost.resharding_paths import divisibility, resharding_steps
from autopar.cost.user_collectives import registered
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.ir.sharding_changes import Change

_Shardings = tuple[TensorSharding, ...]
#: Communication that can overlap with kernels: the all-gather of a step's inputs, the reduction of what only its
#: update reads.
Hideable = Literal["gather", "sum"]
#: Added to the time of each collective as a tie-break, so that of two paths with equal time (a reduce-scatter and an
#: all-gather after a reshape, or one all-reduce) the one with fewer collectives wins.
EACH_S = 1e-9
_LARGEST = 1 << 48  # elements of a tensor: a key of 64 bits holds this and a collective's number


@dataclass(frozen=True, slots=True)
class InPlaceUpdate:
    """Carried state that a kernel updates from a tensor.

    A reduce-scatter's result has the scattered dim outermost in memory. Where that is not the state's layout, the
    kernel transposes, so that it cannot write in place: XLA copies each state.

    Args:
        itemsizes: bytes per element of each state.
        order: the state's dim for each dim of the tensor.
    """

    itemsizes: tuple[float, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Structure:
    """The steps between all pairs of two lists of shardings, whatever the tensor's size.

    Args:
        dims: the tensor's dims per pair, dims that either side splits first, int[pairs, dims].
        steps: (pairs with an i-th step, number of its collective, number of parts of each of their `dims`) per i.
    """

    dims: np.ndarray
    steps: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]


class _Patterns:
    """The steps of each known pattern.

    Attributes:
        collectives: number of each step's collective, int[patterns, steps]; -1 for no step.
        parts: number of parts of each dim that either side splits, in order, int[patterns, steps, dims].
        named: the number of each collective, by its kind, its axes, the position of the dim that it gathers or
            scatters, and the position of the dim that it splits more finely on one side; -1 for none.
    """

    def __init__(self, mesh: MeshShape) -> None:
        self.collectives = np.empty((0, 0), np.int64)
        self.parts = np.empty((0, 0, 0), np.int64)
        self.named: dict[tuple[Change, tuple[str, ...], int, int], int] = {}
        self._mesh = mesh
        self._sizes: dict[tuple[str, ...], int] = {}
        self._numbers: dict[bytes, int] = {}
        self._columns = np.empty(0, int), np.empty(0), np.empty(0, int), np.empty(0, np.int64)

    def find(
        self,
        keys: Sequence[bytes],
        pairs: Sequence[tuple[TensorSharding, TensorSharding, Sequence[int]]],
        divisors: tuple[int, ...],
    ) -> np.ndarray:
        """The numbers of some patterns.

        Args:
            keys: key that identifies each pattern.
            pairs: a pair of shardings with that pattern, and the dims that either splits.
            divisors: result of `divisibility` for the tensor's shape.
        """
        new: list[list[tuple[int, list[int]]]] = []
        for key, (made, wanted, dims) in zip(keys, pairs, strict=True):
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers)
                new.append(self._steps(made, wanted, divisors, dims))
        self._add(new)
        return np.array([self._numbers[key] for key in keys], int)

    def _steps(
        self, made: TensorSharding, wanted: TensorSharding, divisors: tuple[int, ...], dims: Sequence[int]
    ) -> list[tuple[int, list[int]]]:
        found: list[tuple[int, list[int]]] = []
        for step in resharding_steps(made, wanted, divisors, self._mesh):
            if step.payload is not None:
                at = -1 if step.dim is None else dims.index(step.dim)
                split = at if step.to is None else dims.index(step.to)
                number = self.named.setdefault((step.kind, step.axes, at, split), len(self.named))
                found.append((number, [self._size(step.payload.dims[d]) for d in dims]))
        return found

    def moved(self) -> np.ndarray:
        """The position of the dim that each collective gathers or scatters, by the collective's number."""
        return self._of_named()[0]

    def scattered(self, collectives: np.ndarray) -> np.ndarray:
        """The fraction of the payload that each reduce-scatter leaves on a device; 0 for other collectives."""
        return self._of_named()[1][collectives]

    def finer(self, collectives: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """The parts of each dim on the finer side of some collectives, int[collectives, dims].

        Args:
            parts: parts of each dim of their payloads.
        """
        _, _, split, sizes = self._of_named()
        found, rows = parts.copy(), np.flatnonzero(split[collectives] >= 0)
        found[rows, split[collectives[rows]]] *= sizes[collectives[rows]]
        return found

    def _of_named(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """By a collective's number: the dim that it gathers or scatters, the fraction that a reduce-scatter leaves, the dim
        that it splits more finely, and the number of its devices."""
        if len(self._columns[0]) < len(self.named):
            named = list(self.named)
            sizes = [self._size(axes) for _, axes, _, _ in named]
            kept = [
                1.0 / size if kind == "reduce-scatter" else 0.0 for (kind, *_), size in zip(named, sizes, strict=True)
            ]
            moved, split = [at for _, _, at, _ in named], [at for _, _, _, at in named]
            self._columns = np.array(moved, int), np.array(kept), np.array(split, int), np.array(sizes, np.int64)
        return self._columns

    def _size(self, axes: tuple[str, ...]) -> int:
        if axes not in self._sizes:
            self._sizes[axes] = self._mesh.sizes(axes)
        return self._sizes[axes]

    def _add(self, new: Sequence[list[tuple[int, list[int]]]]) -> None:
        old, most, rank = self.parts.shape
        most = max((most, *map(len, new)))
        rank = max((rank, *(len(parts) for steps in new for _, parts in steps)))
        collectives = np.full((old + len(new), most), -1, np.int64)
        parts = np.ones((old + len(new), most, rank), np.int64)
        collectives[:old, : self.collectives.shape[1]] = self.collectives
        parts[:old, : self.parts.shape[1], : self.parts.shape[2]] = self.parts
        for row, steps in enumerate(new, old):
            for i, (number, of_dims) in enumerate(steps):
                collectives[row, i] = number
                parts[row, i, : len(of_dims)] = of_dims
        self.collectives, self.parts = collectives, parts


class ReshardingTimes:
    """Predicts resharding times on one mesh, and caches patterns and times."""

    def __init__(self, mesh: MeshShape, profile: HardwareProfile) -> None:
        self._mesh, self._profile = mesh, profile
        self._exposed: Mapping[Hideable, float] = {}
        self._axes: dict[tuple[str, ...], int] = {(): 0}  # numbers of lists of axes
        self._patterns = _Patterns(mesh)
        self._structures: dict[tuple[object, ...], _Structure] = {}
        self._times: dict[tuple[object, ...], float] = {}
        self._matrices: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}

    def with_exposed(self, exposed: Mapping[Hideable, float]) -> ReshardingTimes:
        """The same times, of which only an exposed fraction counts for each hideable kind of communication. Both share what they
        cache."""
        other = copy.copy(self)
        other._exposed = exposed
        return other

    def matrix(
        self,
        made: _Shardings,
        wanted: _Shardings,
        shape: tuple[int, ...],
        itemsize: float,
        *,
        combinable: bool,
        hideable: Hideable | None = None,
        update: InPlaceUpdate | None = None,
    ) -> np.ndarray:
        """Seconds from each of `made` to each of `wanted`, with `EACH_S` per collective, float[made, wanted].

        Args:
            update: carried state that the reader updates from the tensor.
        """
        key = (made, wanted, shape, itemsize, combinable, update)
        if key not in self._matrices:
            self._matrices[key] = self._seconds_and_copies(*key)
        seconds, copies = self._matrices[key]
        exposed = 1.0 if hideable is None else self._exposed.get(hideable, 1.0)
        return (exposed * seconds + copies).reshape(len(made), len(wanted))

    def _seconds_and_copies(
        self,
        made: _Shardings,
        wanted: _Shardings,
        shape: tuple[int, ...],
        itemsize: float,
        combinable: bool,
        update: InPlaceUpdate | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of collectives, and of copies for them, of each pair."""
        divisors = divisibility(shape, self._mesh)
        key = (made, wanted, divisors)
        if key not in self._structures:
            self._structures[key] = self._structure(made, wanted, divisors)
        structure = self._structures[key]
        total, copies = np.zeros(len(structure.dims)), np.zeros(len(structure.dims))
        sizes = np.array(shape, np.int64)[structure.dims]
        for pairs, collectives, parts in structure.steps:  # in the order in which a path adds them up
            finer = self._patterns.finer(collectives, parts)
            parts_of_dims = -(-sizes[pairs] // finer) * (finer // parts)
            local = np.prod(parts_of_dims, axis=1)
            seconds = self._seconds(collectives, local, itemsize, combinable)
            if registered():  # registered collectives run only where every dim divides
                is_even = (sizes[pairs] % finer == 0).all(axis=1)
                of_any = self._seconds(collectives, local, itemsize, combinable, of_any=True)
                seconds = np.where(is_even, of_any, seconds)
            total[pairs] += seconds
            moved = self._patterns.moved()[collectives]
            inner = _is_inner(moved, structure.dims[pairs], parts_of_dims)
            copies[pairs] += inner * local * (2 * itemsize / self._profile.memory_bytes_per_s)
            if update is not None:
                shard = self._patterns.scattered(collectives) * local
                shard *= _is_transposed(moved, structure.dims[pairs], parts_of_dims, update.order)
                copies[pairs] += shard * (2 * sum(update.itemsizes) / self._profile.memory_bytes_per_s)
                copies[pairs] += (shard > 0) * len(update.itemsizes) * self._profile.kernel_launch_s
        return total, copies

    def _seconds(
        self, collectives: np.ndarray, local: np.ndarray, itemsize: float, combinable: bool, *, of_any: bool = False
    ) -> np.ndarray:
        """The time of each collective for `local` elements, computed once per distinct pair.

        Args:
            of_any: whether the fastest registered collective for the same change may replace it.
        """
        assert local.max(initial=0) < _LARGEST, f"a tensor of {local.max()} elements"
        distinct, labels = np.unique(collectives * _LARGEST + local, return_inverse=True)
        named = tuple(self._patterns.named)
        seconds = np.empty(len(distinct))
        for i, (collective, elements) in enumerate(zip(*np.divmod(distinct, _LARGEST), strict=True)):
            key = (int(collective), itemsize * int(elements), combinable, of_any)
            if key not in self._times:
                kind, axes, _, _ = named[key[0]]
                of = (key[1], axes, self._mesh, self._profile)
                by = (cheaper_than_built_in(kind, *of, combinable=combinable) if of_any else "") or kind
                self._times[key] = EACH_S + collective_time(by, *of, combinable=combinable and by == kind)
            seconds[i] = self._times[key]
        return seconds[labels]

    def _structure(self, made: _Shardings, wanted: _Shardings, divisors: tuple[int, ...]) -> _Structure:
        rank = len(divisors)
        (first, kept), (second, left) = self._encoded(made, rank), self._encoded(wanted, rank)
        first, second = np.repeat(first, len(wanted), axis=0), np.tile(second, (len(made), 1))
        split = (first != 0) | (second != 0)
        dims = np.argsort(~split, axis=1, kind="stable")  # split dims first, in order
        most = int(split.sum(axis=1).max(initial=0))
        # Divisibility matters only where several axes leave or enter a dim (`resharding_steps`).
        num_axes = np.array([len(axes) for axes in self._axes])  # in the order of their numbers
        several = (first != second) & (num_axes[first] + num_axes[second] > 1)
        crossed = np.where(several, np.array(divisors, np.int64), 0)
        columns = [np.take_along_axis(each, dims, axis=1)[:, :most] for each in (first, second, crossed)]
        pending = [np.repeat(kept, len(wanted))[:, None], np.tile(left, len(made))[:, None]]
        labels, examples, keys = _distinct_rows(np.hstack([*pending, *np.stack(columns, axis=2).swapaxes(0, 1)]))
        pairs = [(made[p // len(wanted)], wanted[p % len(wanted)], dims[p, :most].tolist()) for p in examples.tolist()]
        patterns = self._patterns.find(keys, pairs, divisors)[labels]
        return _Structure(dims, tuple(self._aligned(patterns, rank)))

    def _encoded(self, shardings: Sequence[TensorSharding], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers for the axes that split each dim, int[shardings, dims], and for the unreduced axes, int[shardings]."""
        number = self._axes
        rows = [[number.setdefault(axes, len(number)) for axes in (*s.dims, s.unreduced)] for s in shardings]
        table = np.array(rows, np.int64).reshape(len(shardings), rank + 1)
        return table[:, :rank], table[:, rank]

    def _aligned(self, patterns: np.ndarray, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the i-th steps of all pairs, for each i."""
        known = self._patterns
        for i in range(known.collectives.shape[1]):
            pairs = np.flatnonzero(known.collectives[patterns, i] >= 0)
            if len(pairs):
                parts = np.ones((len(pairs), rank), np.int64)
                width = min(rank, known.parts.shape[2])
                parts[:, :width] = known.parts[patterns[pairs], i, :width]
                yield pairs, known.collectives[patterns[pairs], i], parts


def _is_inner(at: np.ndarray, dims: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`resharding_paths.is_inner`, vectorized over steps.

    Args:
        at: position in `dims` of the dim that each step gathers or scatters, int[steps]; -1 for none.
        dims: order of the tensor's dims, int[steps, dims].
        sizes: local size of each of `dims`.
    """
    rank = dims.shape[1]
    moved = np.take_along_axis(dims, np.maximum(at, 0)[:, None], axis=1) if rank else np.zeros((len(at), 1), int)
    outside = np.where(dims < moved, sizes, 1).prod(axis=1)
    return (at >= 0) & (moved[:, 0] > 0) & (moved[:, 0] < rank - 1) & (outside > 1)


def _is_transposed(at: np.ndarray, dims: np.ndarray, sizes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Whether the dim that a step scatters is not the outermost one of the state that is updated from its result.

    Args:
        at, dims, sizes: as for `_is_inner`.
        order: the state's dim for each dim of the tensor.
    """
    places = np.array(order, int)[dims]
    moved = np.take_along_axis(places, np.maximum(at, 0)[:, None], axis=1)
    return (at >= 0) & (np.where(places < moved, sizes, 1).prod(axis=1) > 1)


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """The label of each row's class of equal rows; per class, the position of one row and its bytes without zeros at
    the end."""
    labels = np.zeros(len(rows), np.int64)
    for column in rows.T:
        if column.any():
            _, labels = np.unique(labels * (int(column.max()) + 1) + column, return_inverse=True)
    _, examples = np.unique(labels, return_index=True)
    return labels, examples, [rows[i].tobytes().rstrip(b"\0") for i in examples]
