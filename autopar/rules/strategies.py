"""Enumerate the strategies of a group: all assignments of mesh axes to its factors.

In: factors and a mesh. Out: `Strategy` values. A strategy gives the sharding of each tensor of its group.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.factors import ContextLoop, DimFactors, Factor
from autopar.rules.halo_window import Window

#: A factor whose size the axes do not divide may still be split if padding adds at most this fraction, 1 / UNEVEN_WASTE
#: (for GPT-2's vocabulary of 50,257 over 8 devices it adds 1 / 7,000).
UNEVEN_WASTE = 16


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a group: for each factor the axes that split it, in mesh order."""

    axes: tuple[tuple[str, ...], ...]

    def sharding(self, dims: DimFactors, pending: Sequence[int] = ()) -> TensorSharding:
        """The sharding of a tensor with these dims. Axes on a `pending` factor leave it unreduced."""
        return TensorSharding(
            tuple(self.axes[dim[0]] if dim else () for dim in dims),
            tuple(axis for factor in pending for axis in self.axes[factor]),
        )


def enumerate_strategies(
    factors: Sequence[Factor],
    mesh: MeshShape,
    *,
    even: Collection[int] = (),
    fixed: Collection[int] = (),
    manual: Collection[int] = (),
    windows: Mapping[int, Sequence[Window | ContextLoop]] | None = None,
    pinned: Sequence[tuple[int, tuple[str, ...]]] = (),
) -> tuple[Strategy, ...]:
    """Enumerate all strategies: each mesh axis splits at most one factor. Axes of size 1 split none.

    The first strategy is the replicated one, except for pinned factors.

    Args:
        even: factors that may only be split into equal parts.
        fixed: factors that may not be split.
        manual: factors of a manual region: where one of them is split, all factors are split into equal parts.
        windows: by factor, how its loop reads dims of operands; a factor is split only if each device's neighbours have all
            elements that it reads, or if its chunks can be shared.
        pinned: factors that the program itself splits, with their axes.
    """
    windows = windows or {}
    real = {axis for axis in mesh.axis_names if mesh.size(axis) > 1}
    given = {factor: tuple(axis for axis in axes if axis in real) for factor, axes in pinned}
    axes = [axis for axis in mesh.axis_names if axis in real and not any(axis in taken for taken in given.values())]
    choices = [None, *(i for i in range(len(factors)) if i not in fixed and i not in given)]
    strategies = []
    for assignment in itertools.product(choices, repeat=len(axes)):
        split: list[tuple[str, ...]] = [()] * len(factors)
        for axis, factor in zip(axes, assignment, strict=True):
            if factor is not None:
                split[factor] = (*split[factor], axis)
        all_even = any(split[i] for i in manual)
        if all(
            _allowed(factors[i].size, mesh.sizes(s), all_even or i in even)
            and all(window.local(mesh.sizes(s)) for window in windows.get(i, ()))
            for i, s in enumerate(split)
            if s
        ):
            strategies.append(Strategy(tuple(given.get(i, s) for i, s in enumerate(split))))
    return tuple(strategies)


def _allowed(size: int, parts: int, must_be_even: bool) -> bool:
    if size % parts == 0:
        return True
    padding = -(-size // parts) * parts - size
    return not must_be_even and padding * UNEVEN_WASTE <= size
