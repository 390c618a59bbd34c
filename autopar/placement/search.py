"""Search for the placement with the largest goodput of those in which every model has a replica; then for the fewest devices, and the
fewest bytes to load.

In: models, a trace, a number of devices. Out: `Found`. Groups of one layout each are filled with models by expected goodput
(`expected`); the best of these, the solution of the rate problem (`rate_bound`) and what runs now are starts. From there, models are
placed greedily: of all placements that differ in a group or two, those with the largest expected goodput are simulated, and the
best is taken, until none is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import PlacementError
from autopar.placement.change import Running, change_bytes
from autopar.placement.evaluate import Evaluator
from autopar.placement.expected import Demand
from autopar.placement.layouts import Layout
from autopar.placement.neighbours import Neighbours
from autopar.placement.placements import Group, ModelSpec, Placement, by_name, check, fits, least_bytes
from autopar.placement.rate_bound import largest_rates
from autopar.placement.simulate import Outcome, simulate
from autopar.placement.traces import Trace

#: Models with a replica, requests within their bounds, and the negative numbers of devices and of bytes to load.
_Value = tuple[int, int, int, float]
#: Placements of a neighbourhood that are simulated before the next step is taken, and at most.
_BATCH, _MOST = 8, 32
_STARTS = 4
#: Of the placements that were found, as many are compared on a part of the trace with so many times the requests.
_FINALISTS, _LONGER = 3, 5
#: The number of models that lose the most requests, and of groups that are the least busy, which are tried together first.
_FOCUS = 2
#: The largest number of models times devices with which every neighbour is simulated.
_SMALL = 32
#: The seconds of the rate problem of a start.
_SOLVER_S = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """A placement, and how it was found.

    Args:
        placement: the placement. outcome: its simulation on the whole trace.
        firsts: the first device of each group, by its number. load_bytes: the bytes of weights to load.
        num_placements: the placements that were compared. num_iterations: the iterations of engines simulated for that.
    """

    placement: Placement
    outcome: Outcome = field(repr=False)
    firsts: Mapping[int, int]
    load_bytes: float
    num_placements: int
    num_iterations: int

    @property
    def running(self) -> Running:
        """The placement as what runs, for a later search."""
        return Running(self.placement, self.firsts)


def place(
    models: Sequence[ModelSpec],
    trace: Trace,
    num_devices: int,
    budget_bytes: float,
    *,
    current: Running | None = None,
    keeps_groups: bool = False,
    max_requests: int = 600,
    effort: int = 100_000,
) -> Found:
    """Find a placement.

    Args:
        models: every model of the trace, with its times on the layouts that groups may have.
        budget_bytes: the memory of one device.
        current: what runs now; None for nothing.
        keeps_groups: whether groups stay as they are in `current`, and only their models change.
        max_requests: placements are compared on the busiest part of the trace with at most so many requests.
        effort: the number of iterations of engines to simulate, after which the best placement so far is taken; 100,000 take
            about half a minute.

    Raises:
        PlacementError: a model is missing, no layout has room for one, or `current` cannot run.
    """
    named = by_name(models)
    _check(named, trace, num_devices, budget_bytes)
    if max_requests < 1:
        raise PlacementError(f"max_requests is {max_requests}: give 1 or more")
    if current is not None:
        check(current.placement, named, budget_bytes)
    part = busiest(trace, max_requests)
    search = _Search(named, part, num_devices, budget_bytes, current, effort, keeps_groups=keeps_groups)
    finalists = search.run()
    longer, outcomes = busiest(trace, _LONGER * max_requests), dict[Placement, Outcome]()
    if longer is not part:  # the order on the part need not be that on the whole trace
        outcomes = {each: simulate(each, named, longer, budget_bytes) for each in finalists}
        finalists.sort(
            key=lambda each: (search.num_placed(each), outcomes[each].num_good, -each.num_devices), reverse=True
        )
    best = finalists[0]
    outcome = outcomes[best] if outcomes and longer is trace else simulate(best, named, trace, budget_bytes)
    load_bytes, firsts = change_bytes(best, current, named, num_devices, keeps_groups=keeps_groups)
    evaluator = search.evaluator
    return Found(best, outcome, firsts, load_bytes, evaluator.num_placements, evaluator.num_iterations)


def busiest(trace: Trace, max_requests: int) -> Trace:
    """The part of a trace with `max_requests` requests that takes the shortest time; the trace itself if it has no more."""
    if trace.num_requests <= max_requests:
        return trace
    spans = trace.arrival_s[max_requests:] - trace.arrival_s[:-max_requests]
    first = int(spans.argmin())
    part = slice(first, first + max_requests)
    columns = (trace.model[part], trace.prompt_tokens[part], trace.output_tokens[part])
    arrivals = trace.arrival_s[part] - trace.arrival_s[first]
    return Trace(trace.models, arrivals, *columns, duration_s=max(float(spans[first]), 1e-9))


class _Search:
    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        trace: Trace,
        num_devices: int,
        budget_bytes: float,
        current: Running | None,
        effort: int,
        *,
        keeps_groups: bool,
    ) -> None:
        layouts = sorted({layout for model in models.values() for layout in model.times})
        self._layouts = [layout for layout in layouts if layout.num_devices <= num_devices]
        self._models, self._num_devices, self._current = models, num_devices, current
        self._budget, self._effort, self._keeps_groups = budget_bytes, effort, keeps_groups
        self._demand = Demand(models, trace)
        self.evaluator = Evaluator(models, trace, budget_bytes)
        self._neighbours = Neighbours(models, self._layouts, num_devices, budget_bytes)
        counts = np.bincount(trace.model, minlength=len(trace.models)).tolist()
        self._num_requests: dict[str, int] = dict(zip(trace.models, counts, strict=True))
        is_small = len(models) * num_devices <= _SMALL
        self._most = 10**9 if is_small else _MOST

    def run(self) -> list[Placement]:
        """The best placements that were found, the best one first; what runs now, and that with the largest rates."""
        starts = self._starts()
        given = starts[: 1 if self._current is None else 2]
        values = {start: self._value(start) for start in starts}
        for start in sorted(starts, key=lambda start: values[start] or (), reverse=True):
            found = self._climb(start)
            values[found] = self._value(found)
        ranked = sorted(values, key=lambda each: values[each] or (), reverse=True)
        return list(dict.fromkeys([*ranked[:_FINALISTS], *given]))

    def _value(self, placement: Placement, least: _Value | None = None) -> _Value | None:
        """The objective, larger is better: models with a replica, requests within their bounds, devices, bytes to load.

        Args:
            least: a value to be reached; None is returned as soon as it is clear that it is not.
        """
        num_placed = self.num_placed(placement)
        if least is not None and num_placed < least[0]:
            return None
        score = self.evaluator.score_if(placement, 0 if least is None or num_placed > least[0] else least[1])
        if score is None:
            return None
        load_bytes, _ = change_bytes(
            placement, self._current, self._models, self._num_devices, keeps_groups=self._keeps_groups
        )
        return num_placed, score.num_good, -placement.num_devices, -load_bytes

    def num_placed(self, placement: Placement) -> int:
        """The number of models with a replica."""
        placed = {name for group in placement.groups for name in group.models}
        return sum(name in placed for name in self._demand.rate_per_s)

    def _expected(self, placement: Placement) -> tuple[int, float, int]:
        return self.num_placed(placement), self._demand.expected_per_s(placement), -placement.num_devices

    def _starts(self) -> list[Placement]:
        """The placement that runs now, that with the largest rates, and the best of those with one layout."""
        starts = [] if self._current is None else [self._current.placement.canonical()]
        if self._current is not None and self._keeps_groups:
            empty = [Group(group.layout, ()) for group in self._current.placement.groups]
            return list(dict.fromkeys([*starts, self._filled(empty)]))
        solved = largest_rates(self._models, self._demand, self._num_devices, self._budget, time_limit_s=_SOLVER_S)
        starts.append(solved.placement.canonical())
        filled = [self._filled(self._groups_of(layout)) for layout in self._layouts]
        filled = [each for each in filled if each.groups]
        starts += sorted(filled, key=self._expected, reverse=True)[:_STARTS]
        return list(dict.fromkeys(starts))

    def _groups_of(self, layout: Layout) -> list[Group]:
        """Groups of one layout, and larger ones for models that do not fit there, without models."""
        groups, left = [], self._num_devices
        for larger in sorted({self._least_layout(name) for name in self._models}, key=_size, reverse=True):
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
        best = self._expected(Placement(tuple(groups)))
        while True:
            found = None
            for number in {group: number for number, group in enumerate(groups)}.values():
                for name in self._models:
                    more = groups[number].with_model(name)
                    if name in groups[number].models or not self._neighbours.fits(more):
                        continue
                    changed = [*groups[:number], more, *groups[number + 1 :]]
                    value = self._expected(Placement(tuple(changed)))
                    if value[0] > best[0] or (value[0] == best[0] and value[1] > best[1] * (1 + 1e-6)):
                        found, best = changed, value
            if found is None:
                return Placement(tuple(groups)).canonical()
            groups = found

    def _least_layout(self, name: str) -> Layout:
        """The layout with the fewest devices on which a model fits and meets its bounds, if there is one."""
        fitting = [each for each in self._layouts if self._neighbours.fits(Group(each, (name,)))]
        needs = self._demand.needs
        in_time = [each for each in fitting if (name, each) in needs and needs[name, each].on_time > 0]
        return min(in_time or fitting, key=_size)

    def _climb(self, placement: Placement) -> Placement:
        """Take the best simulated neighbour until none is better."""
        value = self._value(placement)
        assert value is not None
        while self.evaluator.num_iterations < self._effort:
            neighbours = sorted(self._steps(placement), key=self._expected, reverse=True)[: self._most]
            ranked = list(dict.fromkeys([*self._where_requests_are_lost(placement), *neighbours]))
            found = None
            for first in range(0, len(ranked), _BATCH):
                for each in ranked[first : first + _BATCH]:
                    new = self._value(each, value)
                    if new is not None and new > value:
                        found, value = each, new
                    if self.evaluator.num_iterations >= self._effort:
                        break
                if found is not None:
                    break
            if found is None:
                break
            placement = found
        return placement

    def _where_requests_are_lost(self, placement: Placement) -> list[Placement]:
        """The models that lose the most requests, each with a replica more on the groups that are the least busy."""
        score, groups = self.evaluator.score(placement), placement.groups
        lost = {name: num - score.good[name] for name, num in self._num_requests.items()}
        found: list[Placement] = []
        for name in sorted(lost, key=lost.__getitem__, reverse=True)[:_FOCUS]:
            others = [n for n, group in enumerate(groups) if name not in group.models]
            others = [n for n in others if self._neighbours.fits(groups[n].with_model(name))]
            for number in sorted(others, key=score.busy.__getitem__)[:_FOCUS]:
                changed = (*groups[:number], groups[number].with_model(name), *groups[number + 1 :])
                found.append(Placement(changed).canonical())
        return found

    def _steps(self, placement: Placement) -> Iterable[Placement]:
        """The neighbours of a placement; if groups stay, those with the groups that run now."""
        neighbours = self._neighbours.of(placement)
        if self._current is None or not self._keeps_groups:
            return neighbours
        there = Counter(group.layout for group in self._current.placement.groups)
        return [each for each in neighbours if Counter(group.layout for group in each.groups) <= there]


def _size(layout: Layout) -> int:
    return layout.num_devices


def _check(models: Mapping[str, ModelSpec], trace: Trace, num_devices: int, budget_bytes: float) -> None:
    if num_devices < 1:
        raise PlacementError(f"the number of devices is {num_devices}: give 1 or more")
    for name in trace.models:
        if name not in models:
            raise PlacementError(f"the trace has requests for {name!r}, but the models are {', '.join(models)}: add it")
    for name, model in models.items():
        possible = [layout for layout in model.times if layout.num_devices <= num_devices]
        if not any(fits(Group(layout, (name,)), models, budget_bytes) for layout in possible):
            least = min((least_bytes(Group(layout, (name,)), models) for layout in possible), default=0.0)
            raise PlacementError(
                f"{name!r} fits on no group of at most {num_devices} devices: it takes {least / 1e9:.3g} GB on each, with a cache"
                f" for one sequence, of {budget_bytes / 1e9:.3g} GB. Use more or larger devices, or a shorter max_length"
            )
