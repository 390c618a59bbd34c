"""Restrict a problem to some strategies of each node, reduce the rest, and map its assignments back.

In: a `Problem` and the positions of the strategies to keep. Out: `Part`, the reduced problem over these strategies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.instant_thinning import thin
from autopar.solve.live_instants import instants_of
from autopar.solve.presolve import Reduced, reduce
from autopar.solve.problem import ROUNDING, Edge, Problem, Usage


@dataclass(frozen=True, slots=True)
class Part:
    """The reduced problem over some strategies of each node, and the mapping back to the root problem."""

    reduced: Reduced
    keep: tuple[np.ndarray, ...]
    whole: Part | None = None
    deadline: float = math.inf

    @property
    def problem(self) -> Problem:
        return self.reduced.problem

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The assignment of the root problem that corresponds to an assignment of this part."""
        full = self.reduced.expand(choices)
        full = tuple(int(strategies[choice]) for strategies, choice in zip(self.keep, full, strict=True))
        return full if self.whole is None else self.whole.expand(full)

    def within(self, keep: Sequence[np.ndarray]) -> Part | None:
        """This part restricted to the strategies at positions `keep`; None if no assignment is left."""
        reduced = reduce(_restricted(self.problem, keep), deadline=self.deadline)
        return None if reduced is None else Part(reduced, tuple(keep), self, self.deadline)

    def thinned(self, problem: Problem) -> Part | None:
        """This part with its problem replaced by an equivalent one and reduced again."""
        reduced = reduce(problem, deadline=self.deadline)
        keep = tuple(np.arange(len(c)) for c in self.problem.node_costs)
        return None if reduced is None else Part(reduced, keep, self, self.deadline)

    def size(self) -> int:
        """Number of entries of all edges."""
        return sum(e.costs.size for e in self.problem.edges)

    def rounding_error(self, *sums: float) -> float:
        """Upper bound of the rounding error of sums over the part's choices whose terms are off the grid."""
        problem = self.problem
        terms = len(problem.node_costs) + len(problem.edges) + len(problem.usages)
        return 2.0**-50 * terms * sum(abs(s) for s in sums if math.isfinite(s))


def whole_part(problem: Problem, deadline: float = math.inf) -> Part | None:
    """The whole problem as a reduced part; None if reductions prove that no assignment fits."""
    if problem.memory_limit is not None and _least_load(problem) > problem.memory_limit * (1 + ROUNDING):
        return None
    reduced = reduce(problem, deadline=deadline)
    if reduced is None:
        return None
    part = Part(reduced, tuple(np.arange(len(c)) for c in problem.node_costs), None, deadline)
    while part is not None and (thinned := thin(part.problem)) is not part.problem:
        smaller = part.thinned(thinned)
        if smaller is None or smaller.size() >= part.size():
            return smaller
        part = smaller
    return part


def _least_load(problem: Problem) -> float:
    """Peak memory if every node takes its least amount at each instant, in bytes."""
    instants = instants_of(problem)
    return float(instants.loads_of([float(np.min(u.amounts)) for u in instants.usages]).max(initial=0.0))


def _restricted(problem: Problem, keep: Sequence[np.ndarray]) -> Problem:
    """The problem restricted to positions `keep` of each node; edges that shared a matrix still share one."""
    parts: dict[tuple[int, bytes, bytes], np.ndarray] = {}

    def part(e: Edge) -> Edge:
        rows, columns = keep[e.source], keep[e.target]
        key = (id(e.costs), rows.tobytes(), columns.tobytes())
        if key not in parts:
            parts[key] = e.costs[rows[:, None], columns]
        return replace(e, costs=parts[key])

    return replace(
        problem,
        node_costs=tuple(c[k] for c, k in zip(problem.node_costs, keep, strict=True)),
        edges=tuple(map(part, problem.edges)),
        usages=tuple(Usage(u.node, u.start, u.end, u.amounts[keep[u.node]]) for u in problem.usages),
    )
