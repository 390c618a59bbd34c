"""Strategies: every way to lay mesh axes on the factors of a group.

In: factors and a mesh. Out: `Strategy` values, from which shardings of all its tensors follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.factors import DimFactors, Factor
from autopar.rules.halo_window import Window

#: A factor that an axis does not divide may still be split if padding wastes at most 1 part in this
#: many (GPT-2's vocabulary of 50,257 over 8 devices wastes 1 in 7,000).
UNEVEN_WASTE = 16


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a group: per factor the axes that split it, in mesh order."""

    axes: tuple[tuple[str, ...], ...]

    def sharding(self, dims: DimFactors, pending: Sequence[int] = ()) -> TensorSharding:
        """How a tensor with these dims is split; axes on a pending factor leave it unreduced."""
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
    windows: Mapping[int, Sequence[Window]] | None = None,
    pinned: Sequence[tuple[int, tuple[str, ...]]] = (),
) -> tuple[Strategy, ...]:
    """All strategies: each mesh axis splits one factor or none. Axes of size 1 split nothing.

    The first is the replicated one, but for what is pinned. Where a `manual` factor is split, all factors are split
    evenly. A factor with windows is split where neighbours have all that is read.
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
