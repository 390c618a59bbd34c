"""Assign whole arrays to servers: largest first, improved and, in small cases, proven by branch and bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from autopar.versions.layout.servers import ClockCost

#: Assignments that the branch and bound looks at, of at most so many arrays: some 0.1 s.
MOST_STEPS, MOST_ARRAYS = 20_000, 200


@dataclass(frozen=True, slots=True)
class Job:
    """An array that stays whole."""

    key: str
    num_bytes: int


def assigned(
    jobs: Sequence[Job], costs: Sequence[ClockCost], shares: Sequence[Fraction], bound: Fraction
) -> tuple[dict[str, int], bool]:
    """The server of each array, and whether the time of the slowest server is proven to be the least.

    Args:
        shares: bytes of each server in the fractional solution, which decide where times are equal.
        bound: no assignment is faster.
    """
    ordered = sorted(jobs, key=lambda job: (-job.num_bytes, job.key))
    unit = math.lcm(*(part.denominator for cost in costs for part in (cost.fixed_s, cost.byte_s, cost.piece_s)))
    scaled = [
        _Cost(int(cost.fixed_s * unit), int(cost.byte_s * unit), int(cost.piece_s * unit)) for cost in costs
    ]  # whole numbers are exact too, and faster
    search = _Search(ordered, scaled, shares, bound * unit, [0] * len(costs), [0] * len(costs))
    search.largest_first()
    proven = search.best_time <= search.bound or (len(jobs) <= MOST_ARRAYS and search.improve(0))
    return {job.key: server for job, server in zip(ordered, search.best, strict=True)}, proven


@dataclass(frozen=True, slots=True)
class _Cost:
    """A `ClockCost` in a unit of time in which all are whole numbers."""

    fixed: int
    byte: int
    piece: int

    def time(self, num_bytes: int, num_pieces: int) -> int:
        return self.fixed + self.byte * num_bytes + self.piece * num_pieces


@dataclass(slots=True)
class _Search:
    """Branch and bound over the jobs in their order.

    Args:
        loads, counts: bytes and arrays of each server in the present branch.
    """

    jobs: Sequence[Job]
    costs: Sequence[_Cost]
    shares: Sequence[Fraction]
    bound: Fraction
    loads: list[int]
    counts: list[int]
    best: list[int] = field(default_factory=list)
    best_time: int = 0
    branch: list[int] = field(default_factory=list)
    steps: int = 0

    def largest_first(self) -> None:
        """Each array to the server that then takes least time."""
        loads, counts = [0] * len(self.costs), [0] * len(self.costs)
        for job in self.jobs:
            server = min(
                range(len(self.costs)),
                key=lambda number: (
                    self.costs[number].time(loads[number] + job.num_bytes, counts[number] + 1),
                    loads[number] - self.shares[number],
                    number,
                ),
            )
            loads[server] += job.num_bytes
            counts[server] += 1
            self.best.append(server)
        self.best_time = max(map(_Cost.time, self.costs, loads, counts))

    def improve(self, depth: int) -> bool:
        """Search below the present branch; whether all of it was seen."""
        if depth == len(self.jobs):
            time = max(map(_Cost.time, self.costs, self.loads, self.counts))
            if time < self.best_time:
                self.best, self.best_time = list(self.branch), time
            return True
        job, tried, complete = self.jobs[depth], set[tuple[object, ...]](), True
        for server in sorted(range(len(self.costs)), key=lambda one: self._time(one, job)):
            if self.best_time == self.bound:
                return True
            state = (self.costs[server], self.loads[server], self.counts[server])
            rising = self.costs[server].byte >= 0
            if state in tried or (rising and self._time(server, job) >= self.best_time):
                continue
            tried.add(state)
            if self.steps >= MOST_STEPS:
                return False
            self.steps += 1
            self.loads[server] += job.num_bytes
            self.counts[server] += 1
            self.branch.append(server)
            complete &= self.improve(depth + 1)
            self.branch.pop()
            self.loads[server] -= job.num_bytes
            self.counts[server] -= 1
        return complete

    def _time(self, server: int, job: Job) -> int:
        return self.costs[server].time(self.loads[server] + job.num_bytes, self.counts[server] + 1)
