"""The placements that a search may find, and those that it starts from.

In: models, a trace, a number of devices, what runs now. Out: `Space`. Groups of one layout each are filled with models by expected
goodput (`expected`); the best of these, the solution of the rate problem (`rate_bound`) and what runs now are starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.placement.change import Running, change_bytes
from autopar.placement.expected import Demand
from autopar.placement.layouts import Layout
from autopar.placement.neighbours import Neighbours
from autopar.placement.placements import Group, ModelSpec, Placement
from autopar.placement.rate_bound import largest_rates
from autopar.placement.traces import Trace

#: The starts of one layout.
_STARTS = 4
#: The seconds of the rate problem of a start.
_SOLVER_S = 5.0


class Space:
    """The placements that the search may find, and where it starts."""

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        trace: Trace,
        num_devices: int,
        budget_bytes: float,
        current: Running | None,
        *,
        keeps_groups: bool,
    ) -> None:
        layouts = sorted({layout for model in models.values() for layout in model.times})
        self._layouts = [layout for layout in layouts if layout.num_devices <= num_devices]
        self.models, self.num_devices, self.budget_bytes = models, num_devices, budget_bytes
        self.current, self.keeps_groups = current, keeps_groups
        self.demand = Demand(models, trace)
        self.neighbours = Neighbours(models, self._layouts, num_devices, budget_bytes)

    def load_bytes(self, placement: Placement) -> float:
        """The bytes of weights to load."""
        return change_bytes(placement, self.current, self.models, self.num_devices, keeps_groups=self.keeps_groups)[0]

    def num_placed(self, placement: Placement) -> int:
        """The number of models with a replica."""
        return len({name for group in placement.groups for name in group.models})

    def steps(self, placement: Placement) -> list[Placement]:
        """The neighbours of a placement; if groups stay, those with the groups that run now."""
        neighbours = self.neighbours.of(placement)
        if self.current is None or not self.keeps_groups:
            return neighbours
        there = Counter(group.layout for group in self.current.placement.groups)
        return [each for each in neighbours if Counter(group.layout for group in each.groups) <= there]

    def starts(self) -> list[Placement]:
        """The placement that runs now, that with the largest rates, and the best of those with one layout."""
        starts = [] if self.current is None else [self.current.placement.canonical()]
        if self.current is not None and self.keeps_groups:
            empty = [Group(group.layout, ()) for group in self.current.placement.groups]
            return list(dict.fromkeys([*starts, self._filled(empty)]))
        solved = largest_rates(self.models, self.demand, self.num_devices, self.budget_bytes, time_limit_s=_SOLVER_S)
        starts.append(solved.placement.canonical())
        filled = [self._filled(self._groups_of(layout)) for layout in self._layouts]
        filled = [each for each in filled if each.groups]
        starts += sorted(filled, key=self.expected, reverse=True)[:_STARTS]
        return list(dict.fromkeys(starts))

    def expected(self, placement: Placement) -> tuple[int, float, int]:
        return self.num_placed(placement), self.demand.expected_per_s(placement), -placement.num_devices

    def _groups_of(self, layout: Layout) -> list[Group]:
        """Groups of one layout, and larger ones for models that do not fit there, without models."""
        groups, left = [], self.num_devices
        for larger in sorted({self._least_layout(name) for name in self.models}, key=_size, reverse=True):
            if _size(larger) > _size(layout) and _size(larger) <= left:
                groups.append(Group(larger, ()))
                left -= _size(larger)
        for each in (layout, Layout()):
            if each in self._layouts:
                groups += [Group(each, ())] * (left // _size(each))
                left %= _size(each)
        return groups

    def _filled(self, groups: list[Group]) -> Placement:
        """Groups without models, filled by expected goodput."""
        best = self.expected(Placement(tuple(groups)))
        while True:
            found = None
            for number in {group: number for number, group in enumerate(groups)}.values():
                for name in self.models:
                    more = groups[number].with_model(name)
                    if name in groups[number].models or not self.neighbours.fits(more):
                        continue
                    changed = [*groups[:number], more, *groups[number + 1 :]]
                    value = self.expected(Placement(tuple(changed)))
                    if value[0] > best[0] or (value[0] == best[0] and value[1] > best[1] * (1 + 1e-6)):
                        found, best = changed, value
            if found is None:
                return Placement(tuple(groups)).canonical()
            groups = found

    def _least_layout(self, name: str) -> Layout:
        """The layout with the fewest devices on which a model fits and meets its bounds, if there is one."""
        fitting = [each for each in self._layouts if self.neighbours.fits(Group(each, (name,)))]
        needs = self.demand.needs
        in_time = [each for each in fitting if (name, each) in needs and needs[name, each].on_time > 0]
        return min(in_time or fitting, key=_size)


def _size(layout: Layout) -> int:
    return layout.num_devices
