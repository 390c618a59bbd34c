"""Enumerate the placements that differ from one in a group or two.

In: a placement, models, the number of devices. Out: placements that fit. Groups are added and removed, divided, merged and given
another layout; models are added, removed, replaced, and swapped between two groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from autopar.placement.layouts import Layout
from autopar.placement.placements import Group, ModelSpec, Placement, fits


class Neighbours:
    """Enumerate neighbours.

    Args:
        models: by name. layouts: those that groups may have. num_devices: the number of devices.
        budget_bytes: the memory of one device.
    """

    def __init__(
        self, models: Mapping[str, ModelSpec], layouts: Sequence[Layout], num_devices: int, budget_bytes: float
    ) -> None:
        self._models, self._num_devices, self._budget = models, num_devices, budget_bytes
        self._by_size: dict[int, list[Layout]] = {}
        for layout in layouts:
            self._by_size.setdefault(layout.num_devices, []).append(layout)
        self._fits: dict[Group, bool] = {}

    def fits(self, group: Group) -> bool:
        """Whether a group's models fit on it."""
        if group not in self._fits:
            self._fits[group] = fits(group, self._models, self._budget)
        return self._fits[group]

    def of(self, placement: Placement) -> list[Placement]:
        """All neighbours, each once, in canonical form."""
        groups = placement.canonical().groups
        free = self._num_devices - sum(group.layout.num_devices for group in groups)
        found: dict[Placement, None] = {}
        for taken, put in self._moves(groups):
            more = sum(g.layout.num_devices for g in put) - sum(g.layout.num_devices for g in taken)
            if more > free or not all(map(self.fits, put)):
                continue
            left = list(groups)
            for group in taken:
                left.remove(group)
            found[Placement((*left, *put)).canonical()] = None
        found.pop(Placement(groups), None)
        return list(found)

    def _moves(self, groups: Sequence[Group]) -> Iterator[tuple[tuple[Group, ...], tuple[Group, ...]]]:
        """Groups to take away, and groups to put in their place."""
        names = sorted(self._models)
        for layouts in self._by_size.values():
            for layout, name in itertools.product(layouts, names):
                yield (), (Group(layout, (name,)),)
        distinct = list(dict.fromkeys(groups))
        for group in distinct:
            yield (group,), ()
            for put in self._instead(group, names):
                yield (group,), put
        for one, other in itertools.combinations_with_replacement(distinct, 2):
            if one != other or groups.count(one) > 1:
                for put in self._instead_of_two(one, other):
                    yield (one, other), put

    def _instead(self, group: Group, names: Sequence[str]) -> Iterator[tuple[Group, ...]]:
        models, size = group.models, group.layout.num_devices
        others = [name for name in names if name not in models]
        for name in others:
            yield (group.with_model(name),)
            for gone in models:
                yield (group.without_model(gone).with_model(name),)
        if len(models) > 1:
            yield from ((group.without_model(name),) for name in models)
        for layout in self._by_size[size]:
            if layout != group.layout:
                yield (Group(layout, models),)
        for larger in self._by_size.get(2 * size, ()):
            yield (Group(larger, models),)
        for layout in self._by_size.get(size // 2, ()) if size > 1 else ():
            yield (Group(layout, models),)
            yield Group(layout, models), Group(layout, models)
            for cut in range(1, len(models)):
                yield Group(layout, models[:cut]), Group(layout, models[cut:])
                yield Group(layout, models[::2]), Group(layout, models[1::2])

    def _instead_of_two(self, one: Group, other: Group) -> Iterator[tuple[Group, ...]]:
        for mine, theirs in itertools.product(one.models, other.models):
            if mine not in other.models and theirs not in one.models:
                yield one.without_model(mine).with_model(theirs), other.without_model(theirs).with_model(mine)
        for source, target in ((one, other), (other, one)):
            for name in source.models:
                if name not in target.models:
                    moved = source.without_model(name)
                    yield (moved, target.with_model(name)) if moved.models else (target.with_model(name),)
        both = tuple(sorted({*one.models, *other.models}))
        size = one.layout.num_devices + other.layout.num_devices
        for layout in self._by_size.get(size, ()):
            yield (Group(layout, both),)
