"""Define the changes of a sharding that a single collective can make.

In: shardings of one tensor before and after, and mesh axes. Out: whether a change leads from one to the other, and the
dims that it affects. A change has the name of the HLO collective that makes it; a `cut` sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.ir.sharding import TensorSharding

Change: TypeAlias = Literal["cut", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "all-gather"]
_Leads: TypeAlias = Callable[[TensorSharding, TensorSharding, Set[str]], bool]


def is_change(change: str, before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    """Whether a change over these axes leads from one sharding to the other.

    >>> split, whole = TensorSharding((("x",), ())), TensorSharding(((), ()))
    >>> is_change("all-gather", split, whole, {"x"}), is_change("cut", split, whole, {"x"})
    (True, False)
    """
    return _LEADS[change](before, after, axes)


@dataclass(frozen=True, slots=True)
class Moved:
    """The effect of an all-gather or all-to-all.

    Args:
        axes: mesh axes that it runs over, major first.
        dim: dim that they split before.
        to: dim that they split after; None for an all-gather.
    """

    axes: tuple[str, ...]
    dim: int
    to: int | None


def moved(before: TensorSharding, after: TensorSharding) -> Moved | None:
    """The all-gather or all-to-all between two shardings: innermost axes leave one dim; None if they differ otherwise.

    >>> moved(TensorSharding((("x", "y"), ())), TensorSharding((("x",), ("y",))))
    Moved(axes=('y',), dim=0, to=1)
    """
    if before.unreduced or after.unreduced or len(before.dims) != len(after.dims):
        return None
    changed = [d for d, pair in enumerate(zip(before.dims, after.dims, strict=True)) if pair[0] != pair[1]]
    shrunk = [d for d in changed if len(after.dims[d]) < len(before.dims[d])]
    if len(shrunk) != 1 or len(changed) > 2:
        return None
    (dim,), to = shrunk, next((d for d in changed if d not in shrunk), None)
    axes = before.dims[dim][len(after.dims[dim]) :]
    is_innermost = before.dims[dim] == (*after.dims[dim], *axes)
    return (
        Moved(axes, dim, to) if is_innermost and (to is None or after.dims[to] == (*before.dims[to], *axes)) else None
    )


def _reduces(before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    return before.dims == after.dims and _is_summed(before, after, axes) and axes <= set(before.unreduced)


def _scatters(before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    return _is_summed(before, after, axes) and _is_split(before, after, axes)


def _gathers(before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    return _is_split(after, before, axes) and _is_as_pending(before, after)


def _cuts(before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    return _is_split(before, after, axes) and _is_as_pending(before, after)


def _exchanges(before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    return before.axes == after.axes and axes <= before.axes and _is_as_pending(before, after)


def _permutes(before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    """The parts change their devices, or are cut into smaller ones that begin elsewhere (`formulate.explicit`)."""
    is_cut = _cuts(before, after, after.axes - before.axes) and axes <= before.axes
    return is_cut or _exchanges(before, after, axes)


def _is_split(whole: TensorSharding, split: TensorSharding, axes: Set[str]) -> bool:
    return split.axes == whole.axes | axes and axes.isdisjoint(whole.axes)


def _is_summed(before: TensorSharding, after: TensorSharding, axes: Set[str]) -> bool:
    return set(before.unreduced) - axes == set(after.unreduced)


def _is_as_pending(before: TensorSharding, after: TensorSharding) -> bool:
    return set(before.unreduced) == set(after.unreduced)


_LEADS: Mapping[str, _Leads] = {
    "all-reduce": _reduces,
    "reduce-scatter": _scatters,
    "all-gather": _gathers,
    "cut": _cuts,
    "all-to-all": _exchanges,
    "collective-permute": _permutes,
}
CHANGES = tuple(_LEADS)
