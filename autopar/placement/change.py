"""Count the bytes of weights that a new placement loads, and give its groups devices.

In: the placement that runs now, and a new one. Out: the first device of each new group, and the bytes. A group that has the layout
and the devices of an old group keeps the weights of the models that both run. A group of n devices begins at a multiple of n,
so its devices are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from autopar.placement.layouts import Layout
from autopar.placement.placements import Group, ModelSpec, Placement


def first_devices(groups: Sequence[Group], fixed: Mapping[int, int] | None = None) -> dict[int, int] | None:
    """The first device of each group that runs a model, by its number; the largest group first.

    Args:
        fixed: the first devices of some groups.

    Returns:
        None if the fixed groups overlap.

    >>> from autopar.placement.layouts import Layout
    >>> first_devices([Group(Layout(), ("a",)), Group(Layout(4), ("b",)), Group(Layout(2), ())])
    {1: 0, 0: 4}
    """
    found: dict[int, int] = {}
    taken: set[int] = set()
    order = sorted((n for n, group in enumerate(groups) if group.models), key=lambda n: -groups[n].layout.num_devices)
    for number in sorted(order, key=lambda number: number not in (fixed or {})):
        size = groups[number].layout.num_devices
        first = 0 if fixed is None or number not in fixed else fixed[number]
        if fixed is not None and number in fixed and not taken.isdisjoint(range(first, first + size)):
            return None
        while not taken.isdisjoint(range(first, first + size)):
            first += size
        taken.update(range(first, first + size))
        found[number] = first
    return found


@dataclass(frozen=True, slots=True)
class Running:
    """A placement that runs.

    Args:
        firsts: the first device of each group that runs a model, by its number.
    """

    placement: Placement
    firsts: Mapping[int, int]

    @classmethod
    def of(cls, placement: Placement) -> Running:
        """A placement on the devices of `first_devices`."""
        return cls(placement, first_devices(placement.groups) or {})


def change_bytes(
    new: Placement,
    current: Running | None,
    models: Mapping[str, ModelSpec],
    num_devices: int,
    *,
    keeps_groups: bool = False,
) -> tuple[float, dict[int, int]]:
    """The bytes of weights to load on all devices, and the first device of each group of the new placement.

    Args:
        current: what runs now; None for nothing.
        keeps_groups: whether each new group takes the place of an old one, even if it shares no model with it.
    """
    groups = new.groups
    kept = {} if current is None else _matched(groups, current, models, keeps_groups=keeps_groups)
    while True:
        firsts = first_devices(groups, {number: first for number, (first, _) in kept.items()})
        ends = [first + groups[n].layout.num_devices for n, first in (firsts or {}).items()]
        if firsts is not None and (max(ends, default=0) <= num_devices or not kept):
            return sum(loaded_bytes(groups, firsts, current, models).values()), firsts
        del kept[min(kept, key=lambda number: kept[number][1])]  # it stands in the way of a larger group


def loaded_bytes(
    groups: Sequence[Group], firsts: Mapping[int, int], current: Running | None, models: Mapping[str, ModelSpec]
) -> dict[int, float]:
    """For each group the bytes of weights that are not on its devices yet, on all of them together."""
    old: dict[tuple[Layout, int], tuple[str, ...]] = {}
    if current is not None:
        running = current.placement.groups
        old = {(running[n].layout, first): running[n].models for n, first in current.firsts.items()}
    loaded: dict[int, float] = {}
    for number, first in firsts.items():
        group = groups[number]
        there = old.get((group.layout, first), ())
        loaded[number] = _bytes(group, [name for name in group.models if name not in there], models)
    return loaded


def _matched(
    groups: Sequence[Group], current: Running, models: Mapping[str, ModelSpec], *, keeps_groups: bool
) -> dict[int, tuple[int, float]]:
    """For new groups that take the place of an old one, its first device and the bytes that stay."""
    running, old_firsts = current.placement.groups, current.firsts
    found: dict[int, tuple[int, float]] = {}
    for layout in {group.layout for group in groups}:
        mine = [n for n, group in enumerate(groups) if group.layout == layout and group.models]
        old = [n for n in old_firsts if running[n].layout == layout]
        saved = np.zeros((len(mine), len(old)))
        for row, number in enumerate(mine):
            for column, other in enumerate(old):
                both = sorted({*groups[number].models} & {*running[other].models})
                saved[row, column] = _bytes(groups[number], both, models)
        for row, column in zip(*linear_sum_assignment(saved, maximize=True), strict=True):
            if saved[row, column] > 0 or keeps_groups:
                found[mine[row]] = old_firsts[old[column]], float(saved[row, column])
    return found


def _bytes(group: Group, names: Sequence[str], models: Mapping[str, ModelSpec]) -> float:
    layout = group.layout
    return layout.num_devices * sum(models[name].times[layout].weight_bytes for name in names if name in models)
