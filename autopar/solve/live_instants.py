"""Find the instants at which live memory can exceed the limit.

In: a `Problem` with usages. Out: `Instants`. An instant whose live usages are a subset of another instant's is
left out, and so is an instant at which even the largest amounts fit: neither can be the first to exceed the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.problem import ROUNDING, Problem, Usage


@dataclass(frozen=True, slots=True)
class Instants:
    """Instants, and the live range of each usage."""

    times: np.ndarray
    usages: tuple[Usage, ...]
    _starts: np.ndarray
    _ends: np.ndarray

    def live_at(self, position: int) -> list[Usage]:
        """The usages live at the instant `times[position]`."""
        time = self.times[position]
        live = np.flatnonzero((self._starts <= time) & (time < self._ends))
        return [self.usages[i] for i in live]

    def loads(self, choices: Sequence[int]) -> np.ndarray:
        """Live memory of an assignment at each instant, in bytes."""
        return self.loads_of([float(u.amounts[choices[u.node]]) for u in self.usages])

    def loads_of(self, amounts: Sequence[float] | np.ndarray) -> np.ndarray:
        """Live memory at each instant if each of `usages` takes its entry of `amounts`, in bytes."""
        amounts = np.asarray(amounts, float)

        def until(events: np.ndarray) -> np.ndarray:
            order = np.argsort(events, kind="stable")
            sums = np.concatenate(([0.0], np.cumsum(amounts[order])))
            return sums[np.searchsorted(events[order], self.times, side="right")]

        return until(self._starts) - until(self._ends)


def instants_of(problem: Problem) -> Instants:
    """The instants at which some assignment may exceed the limit; without a limit, every maximal instant."""
    usages = tuple(u for u in problem.usages if u.start < u.end)
    starts = np.array([u.start for u in usages], dtype=np.int64)
    ends = np.array([u.end for u in usages], dtype=np.int64)
    instants = Instants(_last_starts(starts, ends), usages, starts, ends)
    if problem.memory_limit is None:
        return instants
    most = [float(np.max(u.amounts)) for u in usages]
    # The margin covers the rounding of the sums.
    binding = instants.loads_of(most) > problem.memory_limit - ROUNDING * abs(problem.memory_limit)
    return Instants(instants.times[binding], usages, starts, ends)


def _last_starts(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The starts that are followed by an end before the next start: the live set is maximal there."""
    times = np.unique(starts)
    if not len(times):
        return times
    ordered = np.sort(ends)
    first_end = ordered[np.searchsorted(ordered, times, side="right")]
    following = np.append(times[1:], np.iinfo(np.int64).max)
    return times[first_end <= following]
