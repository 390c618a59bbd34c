"""Evaluate many placements on one trace, and simulate equal parts once.

In: models, a trace. Out: the requests of each model that meet their bounds. Groups that share no model do not influence each other,
so a placement is divided into components of groups that share models. Each component is simulated with the requests of its
models, and remembered. In a search, most placements differ from an earlier one in one component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.placement.placements import Group, ModelSpec, Placement
from autopar.placement.simulate import simulate
from autopar.placement.traces import Trace


class Score(NamedTuple):
    """The result of a placement.

    Args:
        good: the number of requests of each model that meet their bounds. busy: as in `Outcome`, in the order of the groups.
    """

    good: Mapping[str, int]
    busy: tuple[float, ...]

    @property
    def num_good(self) -> int:
        return sum(self.good.values())


class Evaluator:
    """Evaluate placements.

    Args:
        models: by name. budget_bytes: the memory of one device.

    Attributes:
        num_iterations: the number of iterations simulated so far.
        num_placements: the number of placements evaluated so far.
    """

    def __init__(self, models: Mapping[str, ModelSpec], trace: Trace, budget_bytes: float) -> None:
        self.models, self.trace, self.budget_bytes = models, trace, budget_bytes
        self.num_iterations = self.num_placements = 0
        self._scores: dict[tuple[Group, ...], Score] = {}
        self._most_good: dict[tuple[Group, ...], int] = {}
        counts = np.bincount(trace.model, minlength=len(trace.models)).tolist()
        self._num_requests = dict(zip(trace.models, counts, strict=True))

    def score(self, placement: Placement) -> Score:
        """Simulate the components of a placement that are new."""
        score = self.score_if(placement, 0)
        assert score is not None
        return score

    def score_if(self, placement: Placement, least_good: int) -> Score | None:
        """The score of a placement; None as soon as it is clear that fewer requests than `least_good` meet their bounds."""
        self.num_placements += 1
        parts = [sorted(part, key=placement.groups.__getitem__) for part in components(placement.groups)]
        keys = [tuple(placement.groups[number] for number in part) for part in parts]
        most = {key: self._most(key) for key in keys}
        if sum(most.values()) < least_good:
            return None
        good = dict.fromkeys(self.trace.models, 0)
        busy = [0.0] * len(placement.groups)
        for part, key in sorted(zip(parts, keys, strict=True), key=lambda each: each[1] not in self._scores):
            # A component that occurs twice cannot be: two equal ones share their models.
            others = sum(most.values()) - most[key]
            found = self._component(key, max(0, least_good - others))
            if found is None:
                return None
            most[key] = found.num_good
            good |= found.good
            for number, share in zip(part, found.busy, strict=True):
                busy[number] = share
        score = Score(good, tuple(busy))
        return score if score.num_good >= least_good else None

    def _most(self, groups: tuple[Group, ...]) -> int:
        """A bound on the requests of a component that meet their bounds."""
        if groups in self._scores:
            return self._scores[groups].num_good
        names = {name for group in groups for name in group.models}
        return self._most_good.get(groups, sum(self._num_requests.get(name, 0) for name in names))

    def _component(self, groups: tuple[Group, ...], least_good: int) -> Score | None:
        """The score of one component; None if fewer requests than `least_good` meet their bounds."""
        if groups not in self._scores:
            if self._most(groups) < least_good:
                return None
            trace = self.trace
            names = {name for group in groups for name in group.models} & {*trace.models}
            part = trace.of_models(names)
            outcome = simulate(
                Placement(groups), self.models, part, self.budget_bytes, most_lost=part.num_requests - least_good
            )
            self.num_iterations += outcome.num_iterations
            if not outcome.is_whole:
                self._most_good[groups] = least_good - 1
                return None
            counts = np.bincount(part.model, outcome.is_good, len(trace.models)).astype(int).tolist()
            good = {name: counts[number] for number, name in enumerate(trace.models) if name in names}
            self._scores[groups] = Score(good, outcome.busy)
        return self._scores[groups]


def components(groups: Sequence[Group]) -> Iterator[list[int]]:
    """The numbers of the groups of each component; groups without models are left out."""
    left = {number for number, group in enumerate(groups) if group.models}
    while left:
        found, new = set[int](), {min(left)}
        while new:
            found |= new
            names = {name for number in new for name in groups[number].models}
            new = {number for number in left - found if not names.isdisjoint(groups[number].models)}
        left -= found
        yield sorted(found)
