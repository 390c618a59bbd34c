"""Record the cheapest assignment found (the incumbent) and the lower bound, and decide whether the search goes on.

In: assignments and bounds of parts of a problem. Out: `Incumbent`, whose gap shows what is proven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from autopar.solve.branch_and_bound import Branched, branch
from autopar.solve.cost_grid import Gridded
from autopar.solve.mip import End
from autopar.solve.problem import Problem
from autopar.solve.search_part import Part

Progress = Callable[[float, float], None]
PROVEN = 1e-6  # relative gap that counts as optimal
_CANCELLED = 1e-12  # rounding error left by cancellation, relative to the sum of absolute values


class Incumbent:
    """The best assignment and the best bound so far of one problem.

    Attributes:
        deadline: end of the search, by `time.monotonic`. relative_gap: gap that ends it.
        choices: the cheapest assignment that fits; empty until one is found.
        cost: its cost, in seconds.
        bound: lower bound of the cost of every assignment that fits; `inf` if none fits.
        interrupted: whether Ctrl-C ended the search.
        grid: the grid of the costs that the bounds are computed from.
        outside: lower bound of the assignments outside the part that is being searched.
    """

    def __init__(self, problem: Problem, deadline: float, progress: Progress | None, relative_gap: float) -> None:
        self.choices: tuple[int, ...] = ()
        self.cost, self.bound, self.outside = np.inf, -np.inf, np.inf
        self.deadline, self.relative_gap = deadline, max(relative_gap, PROVEN)
        self.grid = Gridded(problem, 0.0, np.inf, False, -np.inf)
        self.interrupted = False
        self._problem, self._progress = problem, progress

    @property
    def proven(self) -> bool:
        """Whether the assignment is the optimum."""
        return self._within(PROVEN)

    @property
    def close(self) -> bool:
        """Whether the gap is at most `relative_gap`."""
        return self._within(self.relative_gap)

    def _within(self, relative_gap: float) -> bool:
        if not self.choices:
            return False
        left = self.cost - self.bound
        if left <= relative_gap * abs(self.cost):
            return True
        # Where large costs cancel, the difference carries their rounding error.
        return left <= 2.0 * self.grid.error and left <= _CANCELLED * self._problem.magnitude(self.choices)

    def is_open(self) -> bool:
        """Whether the gap is still open and time is left."""
        settled = self.close or self.bound == np.inf or self.interrupted
        return not settled and time.monotonic() < self.deadline

    def until(self, share: float) -> float:
        """The deadline of a step that may use a share of the remaining time."""
        now = time.monotonic()
        return now + share * (self.deadline - now)

    def keep(self, choices: tuple[int, ...]) -> None:
        """Keep an assignment if it fits and is the cheapest so far."""
        cost = self._problem.evaluate(choices)
        if cost < self.cost and self._problem.fits(choices):
            self.choices, self.cost = choices, cost
            self.report(cost, self.bound)

    def raise_bound(self, bound: float) -> None:
        """Record a lower bound of the current part's assignments that fit (`inf`: none fits)."""
        if bound < np.inf:
            bound = min(bound, self.grid.ceiling) - self.grid.error
        bound = min(bound, self.outside)
        if self.grid.whole and math.isfinite(bound):  # integer costs add up to an integer
            bound = float(math.ceil(bound))
        if bound > self.bound:
            self.bound = bound
            self.report(self.cost, bound)

    def report(self, cost: float, bound: float) -> None:
        """Report the progress of a step that has found this cost or this bound."""
        if self._progress is not None:
            self._progress(min(cost, self.cost), max(bound, self.bound))

    def branch(self, part: Part, deadline: float, relative_gap: float, report: Progress | None = None) -> Branched:
        """Solve a part by HiGHS and keep the assignment found."""
        result = branch(part.problem, deadline=deadline, relative_gap=relative_gap, report=report)
        self.interrupted |= result.end is End.INTERRUPTED
        if result.choices:
            self.keep(part.expand(result.choices))
        return result
