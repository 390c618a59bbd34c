"""Search for the placement with the largest goodput of those in which every model has a replica; then for the fewest devices, and the
fewest bytes to load.

In: models, a trace, a number of devices. Out: `Found`. Starts (`space`) and what queues (`queues`) make of them are climbed from: of all
placements that differ in a group or two, those that the queues and a formula (`expected`) rank first are simulated, and the best is taken,
until none is better. That is done on the busiest part of the trace, and goes on from the best ones on a longer part. Last, fewer
devices are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import PlacementError
from autopar.placement.change import Running, change_bytes
from autopar.placement.evaluate import Evaluator
from autopar.placement.placements import Group, ModelSpec, Placement, by_name, check, fits, least_bytes
from autopar.placement.queues import Queues
from autopar.placement.simulate import Outcome, simulate
from autopar.placement.space import Space
from autopar.placement.traces import Trace

#: Models with a replica, requests within their bounds, and the negative numbers of devices and of bytes to load.
_Value = tuple[int, int, int, float]
#: Placements of a neighbourhood that are simulated before the next step is taken, and at most.
_BATCH, _MOST = 8, 32
#: The placements of a step whose neighbours the queues rank.
_WIDTH = 8
#: Of the placements that they like best, as many are starts.
_GUIDED = 3
#: The share of the requests within bounds, by queues, with which a placement on fewer devices is worth a simulation.
_NEARLY = 0.98
#: Of the placements that were found, as many are compared on a part of the trace with so many times the requests.
_FINALISTS, _LONGER = 3, 5
#: The number of models that lose the most requests, and of groups that are the least busy, which are tried together first.
_FOCUS = 2
#: The requests that join queues in the time of one simulated iteration.
_ARRIVALS = 1_000
#: The largest number of models times devices with which every neighbour is simulated.
_SMALL = 32


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
    effort: int = 150_000,
) -> Found:
    """Find a placement.

    Args:
        models: every model of the trace, with its times on the layouts that groups may have.
        budget_bytes: the memory of one device.
        current: what runs now; None for nothing.
        keeps_groups: whether groups stay as they are in `current`, and only their models change.
        max_requests: placements are compared on the busiest part of the trace with at most so many requests.
        effort: the number of iterations of engines to simulate, after which the best placement so far is taken; 150,000 take
            about a minute.

    Raises:
        PlacementError: a model is missing, no layout has room for one, or `current` cannot run.
    """
    named = by_name(models)
    _check(named, trace, num_devices, budget_bytes)
    if max_requests < 1:
        raise PlacementError(f"max_requests is {max_requests}: give 1 or more")
    if current is not None:
        check(current.placement, named, budget_bytes)
    part, longer = busiest(trace, max_requests), busiest(trace, _LONGER * max_requests)
    space = Space(named, longer, num_devices, budget_bytes, current, keeps_groups=keeps_groups)
    # The order on the part need not be that on the whole trace, so the best ones are compared there, and the climb goes on.
    first = _Search(space, part)
    last = first if longer is part else _Search(space, longer)
    searches, starts = {first, last}, space.starts()

    def left(share: float) -> int:
        """What is left of a share of the effort."""
        return int(share * effort) - sum(each.spent for each in searches)

    liked = first.guided(starts, left(1 / 6))
    found = first.run([*liked[:_GUIDED], *starts], left(2 / 3), ranks_all=True)
    if last is not first:
        liked = last.guided(starts, left(3 / 4))
    given = starts[: 1 if current is None else 2]
    finalists = last.run([*found[:_FINALISTS], *liked[:1], *given], left(11 / 12), ranks_all=False)
    best = last.with_fewer_devices(finalists[0], left(1))
    outcome = simulate(best, named, trace, budget_bytes)
    load_bytes, firsts = change_bytes(best, current, named, num_devices, keeps_groups=keeps_groups)
    num_placements = sum(each.evaluator.num_placements for each in searches)
    num_iterations = sum(each.evaluator.num_iterations for each in searches)
    return Found(best, outcome, firsts, load_bytes, num_placements, num_iterations)


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
    """A climb on one trace, guided by queues and decided by simulation."""

    def __init__(self, space: Space, trace: Trace) -> None:
        is_small = len(space.models) * space.num_devices <= _SMALL
        self._most = 10**9 if is_small else _MOST
        self._space, self._queues = space, Queues(space.models, trace)
        self.evaluator = Evaluator(space.models, trace, space.budget_bytes)
        counts = np.bincount(trace.model, minlength=len(trace.models)).tolist()
        self.num_requests: dict[str, int] = dict(zip(trace.models, counts, strict=True))

    @property
    def spent(self) -> int:
        """The effort so far, in iterations of engines; the queues count by their time."""
        return self.evaluator.num_iterations + self._queues.num_arrivals // _ARRIVALS

    def run(self, starts: list[Placement], effort: int, *, ranks_all: bool) -> list[Placement]:
        """Climb from each start while effort is left.

        Args:
            ranks_all: whether all starts are compared, or a simulation ends as soon as an earlier start is better.

        Returns:
            All placements that were found, the best one first.
        """
        until = self.spent + effort
        values: dict[Placement, _Value | None] = {}
        best = None
        for start in starts:
            values[start] = value = self.value(start, None if ranks_all else best)
            if value is not None and (best is None or value > best):
                best = value
        for start in sorted(values, key=lambda start: values[start] or (), reverse=True):
            if self.spent >= until:
                break
            found = self._climb(start, until)
            values[found] = self.value(found)
        return sorted(values, key=lambda each: values[each] or (), reverse=True)

    def guided(self, starts: list[Placement], effort: int, most_devices: float = math.inf) -> list[Placement]:
        """The placements that the queues like best, of the starts, their neighbours, the neighbours of the best of these, and so on,
        while effort is left.

        Args:
            most_devices: the devices of each neighbour at most.
        """
        until = self.spent + effort
        seen = dict(zip(starts, self.guides(starts), strict=True))
        done: set[Placement] = set()
        while True:
            best = sorted(seen, key=seen.__getitem__, reverse=True)[:_WIDTH]
            new = [each for each in best if each not in done]
            if not new or self.spent >= until:
                return best
            done.update(new)
            steps = dict.fromkeys(step for each in new for step in self._space.steps(each) if step not in seen)
            fewer = [step for step in steps if step.num_devices <= most_devices]
            fewer = fewer[: (until - self.spent) * _ARRIVALS // max(1, self.evaluator.trace.num_requests)]
            seen |= zip(fewer, self.guides(fewer), strict=True)

    def guides(self, placements: Sequence[Placement]) -> list[tuple[int, float, int, float]]:
        """The objective as the queues estimate it, and then the share of the bounds that requests leave."""
        goodput = self._queues.goodput(placements).tolist()
        return [
            (self._space.num_placed(each), good, -each.num_devices, left)
            for each, (good, left) in zip(placements, goodput, strict=True)
        ]

    def value(self, placement: Placement, least: _Value | None = None) -> _Value | None:
        """The objective, larger is better: models with a replica, requests within their bounds, devices, bytes to load.

        Args:
            least: a value to be reached; None is returned as soon as it is clear that it is not.
        """
        num_placed = self._space.num_placed(placement)
        if least is not None and num_placed < least[0]:
            return None
        score = self.evaluator.score_if(placement, 0 if least is None or num_placed > least[0] else least[1])
        if score is None:
            return None
        return num_placed, score.num_good, -placement.num_devices, -self._space.load_bytes(placement)

    def _climb(self, placement: Placement, until: int) -> Placement:
        """Take the best simulated neighbour until none is better, or until so much effort is spent."""
        value = self.value(placement)
        assert value is not None
        while self.spent < until:
            steps = self._ranked(self._space.steps(placement))
            ranked = list(dict.fromkeys([*self._where_requests_are_lost(placement), *steps]))
            found = None
            for start in range(0, len(ranked), _BATCH):
                for each in ranked[start : start + _BATCH]:
                    new = self.value(each, value)
                    if new is not None and new > value:
                        found, value = each, new
                    if self.spent >= until:
                        break
                if found is not None or self.spent >= until:
                    break
            if found is None:
                break
            placement = found
        return placement

    def _where_requests_are_lost(self, placement: Placement) -> list[Placement]:
        """The models that lose the most requests, each with a replica more on the groups that are the least busy."""
        score, groups = self.evaluator.score(placement), placement.groups
        lost = {name: num - score.good[name] for name, num in self.num_requests.items()}
        found: list[Placement] = []
        for name in sorted(lost, key=lost.__getitem__, reverse=True)[:_FOCUS]:
            others = [n for n, group in enumerate(groups) if name not in group.models]
            others = [n for n in others if self._space.neighbours.fits(groups[n].with_model(name))]
            for number in sorted(others, key=score.busy.__getitem__)[:_FOCUS]:
                changed = (*groups[:number], groups[number].with_model(name), *groups[number + 1 :])
                found.append(Placement(changed).canonical())
        return found

    def _ranked(self, steps: list[Placement]) -> list[Placement]:
        """Neighbours in the order in which they are simulated: the best ones by queues and by the formula in turns."""
        guides = dict(zip(steps, self.guides(steps), strict=True))
        by_queues = sorted(steps, key=guides.__getitem__, reverse=True)
        by_formula = sorted(steps, key=self._space.expected, reverse=True)
        both = itertools.chain.from_iterable(zip(by_queues, by_formula, strict=True))
        return list(dict.fromkeys(both))[: self._most]

    def with_fewer_devices(self, placement: Placement, effort: int) -> Placement:
        """A placement with as many requests within bounds on the fewest devices for which one is found while effort is left."""
        until = self.spent + effort
        while self.spent < until:
            value, most = self.value(placement), placement.num_devices - 1
            assert value is not None
            steps = [each for each in self._space.steps(placement) if each.num_devices <= most]
            fewer = self.guided(steps, (until - self.spent) // 2, most)
            guides = [good for _, good, *_ in self.guides([placement, *fewer])]
            found = None
            for each, good in zip(fewer, guides[1:], strict=True):
                if good < _NEARLY * guides[0] or self.spent >= until:
                    continue
                new = self.value(each, value)
                if new is not None and new > value:
                    found, value = each, new
            if found is None:
                break
            placement = found
        return placement


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
