"""Search for the optimum: bound the problem, improve the incumbent, delete strategies that cannot beat it.

Costs are first rounded to a grid (`cost_grid.py`), so that reductions and elimination are exact. If the grid proves too
coarse or too fine for the assignment found, the search runs again on a better grid. At the end a local search
improves the best assignment (`polish.py`).

Each round works on the part of the problem that contains every assignment cheaper than the incumbent:

1. Elimination bounds the part and finds assignments. Without a memory limit and with affordable tables, it finds the
   optimum. With a memory limit, memory gets a price (`memory_dual.py`).
2. The best combination of the strategies seen so far becomes the incumbent, commonly within 0.1 % of the bound.
3. Strategies that appear in no assignment cheaper than the incumbent are deleted. The remaining part is reduced
   again. HiGHS solves it if it is small or no longer shrinks; otherwise another round follows, with larger tables. Without
   a memory limit, another round also comes before HiGHS as long as rounds narrow the gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.solve.cost_grid import Gridded, on_grid
from autopar.solve.elimination import Elimination, plan_elimination, plan_exact
from autopar.solve.greedy_start import cheap_start
from autopar.solve.incumbent import PROVEN, Incumbent, Progress
from autopar.solve.live_instants import instants_of
from autopar.solve.memory_dual import Dual, assignments_at_high_prices, price_memory
from autopar.solve.minimum_memory import minimum_memory
from autopar.solve.polish import polish
from autopar.solve.presolve import Overdue
from autopar.solve.problem import Problem
from autopar.solve.search_budget import Budget
from autopar.solve.search_part import Part, whole_part

_COARSE = 0.1 * PROVEN  # a grid's error relative to the cost, above which a finer grid is used
_START_PATIENCE = 2.0  # times the remaining time, for a first assignment
_REDUCE_SHARE = 0.85  # of the remaining time, for the reduction
_LARGEST_TABLE = 1 << 22  # entries: 32 MB
_EXACT_WORK = 5 * 10**8  # entries that elimination may add up: about one second
_LAST_TABLE, _LAST_WORK = 1 << 24, 5 * 10**8  # the same limits for the last attempt before HiGHS
_BRIEF_WORK = 5 * 10**7  # the same for a small part: about the time in which HiGHS starts
_FIRST_TABLE = 1 << 16  # entries above which the first rounds split a table
_MOST_WORK = 2 * 10**9
_SMALL = 20_000  # edge entries up to which HiGHS solves a part without further rounds
_SHRUNK = 0.8  # a round must shrink the edge entries below this share to be followed by another
_NARROWED = 0.8  # or the gap below this share, without a memory limit
_GROWTH = 4  # of tables, and of the time, from one round to the next
_FIT_SHARE = 0.3  # of the remaining time, to find an assignment that fits
_COMBINE_SHARE = 0.3  # of the remaining time, to combine assignments into an incumbent
_SMALL_GAP, _SMALL_GAP_SHARE = 1e-4, 0.05  # below this relative gap HiGHS gets this share of the remaining time
_MIP_SIZE = 200_000  # edge entries up to which HiGHS is tried first under a memory limit
_MIP_SHARE = 0.6  # of the remaining time, for that first try
_LIKELY_SHARES = (0.5, 0.25, 0.12, 0.06, 0.03)  # shares of the strategies to try exact elimination on


class Search:
    """One search for the optimum of a problem; `best` is the best assignment and the best bound so far."""

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        progress: Progress | None = None,
        *,
        seed: int = 0,
        relative_gap: float = PROVEN,
    ) -> None:
        self.best = Incumbent(problem, budget.deadline, progress, relative_gap)
        self._problem, self._budget, self._seed = problem, budget, seed
        self._mip_gap = 0.1 * PROVEN if relative_gap <= PROVEN else 0.9 * relative_gap
        self._rounds, self._started, self._gap = 0, 0.0, np.inf

    def run(self) -> None:
        """Search until the optimum is proven, the deadline passes or the user interrupts.

        Raises:
            KeyboardInterrupt: if interrupted before anything was found.
        """
        try:
            self._search()
        except KeyboardInterrupt:
            self.best.interrupted = True
        if self.best.interrupted and not self.best.choices:
            raise KeyboardInterrupt
        self.best.report(self.best.cost, self.best.bound)

    def _search(self) -> None:
        grid: Gridded | None = on_grid(self._problem)
        self.best.raise_bound(math.nextafter(grid.least, -math.inf))  # first, so that after Ctrl-C there is a bound
        if self._problem.memory_limit is not None:
            self._start()
        try:
            while grid is not None and self.best.is_open():
                self._search_on(grid)
                grid = self._better_grid()
        except Overdue:
            if not self.best.choices:
                self._start()
        best = self.best
        if best.choices and best.bound < best.cost and not best.interrupted:
            best.keep(polish(self._problem, best.choices, deadline=best.deadline))

    def _search_on(self, grid: Gridded) -> None:
        """Search the whole problem on one grid."""
        self.best.grid, self.best.outside = grid, np.inf
        self._rounds, self._gap = 0, np.inf
        part = self._nonempty(whole_part(grid.problem, self.best.until(_REDUCE_SHARE)))
        while part is not None and self.best.is_open():
            part = self._round(replace(part, deadline=self.best.deadline))

    def _better_grid(self) -> Gridded | None:
        """A better grid for the cost found; None if the last grid suits it."""
        cost, last = self.best.cost, self.best.grid
        if not self.best.choices or not self.best.is_open():
            return None
        better = on_grid(self._problem, cost)
        too_fine = cost > last.ceiling and better.ceiling > last.ceiling
        too_coarse = last.error > _COARSE * abs(cost) and better.error < 0.5 * last.error
        return better if too_fine or too_coarse else None

    def _start(self) -> None:
        """Find some assignment that fits, if any time is left; this may exceed the deadline on a busy machine."""
        deadline = self.best.until(_START_PATIENCE)
        if time.monotonic() < deadline and (choices := cheap_start(self._problem, deadline=deadline)):
            self.best.keep(choices)

    def _nonempty(self, part: Part | None) -> Part | None:
        """The part itself; a part without assignments raises the bound to infinity."""
        if part is None:
            self.best.raise_bound(np.inf)
        return part

    def _round(self, part: Part) -> Part | None:
        """Bound and search a part. Returns what is left to search: None once the part is settled."""
        problem, self._started = part.problem, time.monotonic()
        elimination = plan_exact(problem, max_entries=_LARGEST_TABLE, max_work=_EXACT_WORK)
        if elimination is None and problem.memory_limit is not None:
            if part.size() > _MIP_SIZE:
                return self._search_large(part)
            deadline = self.best.until(_MIP_SHARE)
            self.best.raise_bound(self.best.branch(part, deadline, self._mip_gap, self.best.report).bound)
            if not self.best.is_open():
                return None
        if elimination is None:  # larger tables give better bounds but are seldom worth their time in early rounds
            elimination = plan_elimination(
                problem, max_entries=_FIRST_TABLE * _GROWTH**self._rounds, max_work=_MOST_WORK
            )
        self._rounds += 1
        choices, bound = elimination.solve(problem.node_costs)
        self.best.raise_bound(bound if elimination.exact else bound - part.rounding_error(bound))
        if bound == np.inf:
            return None
        self.best.keep(part.expand(choices))
        if not self.best.is_open() or (elimination.exact and problem.fits(choices)):
            return None
        if problem.memory_limit is None:
            marginals = elimination.marginals(problem.node_costs)
            rounding = part.rounding_error(bound)
            self._solve_likely(part, marginals, bound)
        else:
            dual = _priced(part, elimination, choices, self.best)
            if dual is None or not self.best.is_open():
                return self._settle(part)
            marginals = [m + dual.offset for m in elimination.marginals(dual.priced_costs)]
            rounding = part.rounding_error(dual.bound, dual.offset)
        return self._without_costly(part, marginals, rounding) if self.best.is_open() else None

    def _without_costly(self, part: Part, marginals: Sequence[np.ndarray], rounding: float) -> Part | None:
        """The part without the strategies that no assignment cheaper than the incumbent uses."""
        best = self.best
        cheaper = best.cost - 0.5 * best.relative_gap * abs(best.cost)
        best.outside = min(best.outside, cheaper, best.grid.ceiling - best.grid.error)
        costly = best.outside + best.grid.error + rounding
        left = self._nonempty(part.within([np.flatnonzero(m < costly) for m in marginals]))
        if left is None or _SMALL < left.size() < _SHRUNK * part.size():
            return left
        return self._settle(left)

    def _settle(self, part: Part) -> Part | None:
        """Solve a part to the end: by exact elimination with larger tables, by HiGHS or by the large search. Returns the part if
        another round comes first."""
        if not self.best.is_open():
            return None
        if part.problem.memory_limit is None:
            work = _LAST_WORK if part.size() > _SMALL else _BRIEF_WORK
            elimination = plan_exact(part.problem, max_entries=_LAST_TABLE, max_work=work)
            if elimination is not None:
                choices, bound = elimination.solve(part.problem.node_costs)
                if bound < np.inf:
                    self.best.keep(part.expand(choices))
                self.best.raise_bound(bound)
                return None
        if part.size() > _SMALL and self._narrows(part):
            return part
        if part.size() > _MIP_SIZE:
            return self._search_large(part)
        best = self.best
        is_small = best.cost - best.bound <= _SMALL_GAP * abs(best.cost)
        deadline = best.until(_SMALL_GAP_SHARE) if is_small else best.deadline
        report = best.report if best.outside == np.inf else None  # else its bound is not valid for the whole problem
        best.raise_bound(best.branch(part, deadline, self._mip_gap, report).bound)
        return None

    def _narrows(self, part: Part) -> bool:
        """Whether another round, with larger tables, has time and is likely to narrow the gap of a part without a memory limit."""
        before, self._gap = self._gap, self.best.cost - self.best.bound
        now, table = time.monotonic(), _FIRST_TABLE * _GROWTH**self._rounds
        has_time = now + _GROWTH * (now - self._started) < self.best.deadline
        is_open = part.problem.memory_limit is None and table <= _LARGEST_TABLE and has_time
        return is_open and self._gap < _NARROWED * before

    def _search_large(self, part: Part) -> None:
        """Search a part by message passing and annealing."""
        # Importing numba takes most of a second, and most problems do not need it.
        from autopar.solve.large_search import LargeSearch  # noqa: PLC0415

        least = self.best.cost

        def improved(cost: float) -> None:  # each thread reports its own best
            nonlocal least
            if cost < least:
                least = cost
                self.best.report(cost, self.best.bound)

        search = LargeSearch(
            part.problem,
            self._budget,
            seed=self._seed,
            found=lambda choices: self.best.keep(part.expand(choices)),
            bounded=self.best.raise_bound,
            open=self.best.is_open,
            improved=improved,
            relative_gap=self._mip_gap,
        )
        search.run(lambda: _least_memory(part, self.best) if part.problem.memory_limit is not None else ())

    def _solve_likely(self, part: Part, marginals: Sequence[np.ndarray], bound: float) -> None:
        """Search for an incumbent among the strategies with the lowest bounds, as many as exact elimination can handle."""
        excess = np.sort(np.concatenate(marginals))
        for share in _LIKELY_SHARES:
            most = max(bound, excess[int(share * (len(excess) - 1))])
            likely = part.within([np.flatnonzero(m <= max(most, m.min())) for m in marginals])
            if likely is None or not self.best.is_open():
                continue
            elimination = plan_exact(likely.problem, max_entries=_LARGEST_TABLE, max_work=_EXACT_WORK)
            if elimination is not None:
                self.best.keep(likely.expand(elimination.solve(likely.problem.node_costs)[0]))
                return


def _priced(part: Part, elimination: Elimination, free: tuple[int, ...], best: Incumbent) -> Dual | None:
    """Price the memory of a part; None if no assignment that fits was found. `free` is the optimum without a limit."""
    problem, instants = part.problem, instants_of(part.problem)
    fitting = _fitting(part, elimination, best)
    if not fitting:
        return None
    dual = price_memory(problem, instants, elimination, [free, fitting], deadline=best.deadline)
    best.raise_bound(dual.bound - part.rounding_error(dual.bound, dual.offset))
    for choices in dual.assignments:
        best.keep(part.expand(choices))
    if best.is_open() and dual.assignments:
        met = part.within([np.unique(strategies) for strategies in zip(*dual.assignments, strict=True)])
        if met is not None:
            best.branch(met, best.until(_COMBINE_SHARE), relative_gap=1e-4)
    return dual


def _fitting(part: Part, elimination: Elimination, best: Incumbent) -> tuple[int, ...]:
    """One assignment of the part within the memory limit; empty if none was found."""
    problem = part.problem
    for choices in assignments_at_high_prices(problem, instants_of(problem), elimination):
        best.keep(part.expand(choices))
        if problem.fits(choices) and np.isfinite(problem.evaluate(choices)):
            return choices
    return _least_memory(part, best)


def _least_memory(part: Part, best: Incumbent) -> tuple[int, ...]:
    """The assignment of a part with the lowest peak memory if it fits; empty if none was found."""
    problem, limit = part.problem, part.problem.memory_limit
    assert limit is not None
    for relative_gap in (5e-3, 1e-6):
        share = _FIT_SHARE * (best.deadline - time.monotonic())
        least = minimum_memory(problem, time_limit_s=share, relative_gap=relative_gap)
        if least.lower_bound > limit * (1 + 1e-6):
            best.raise_bound(np.inf)
            break
        if least.choices and problem.fits(least.choices):
            best.keep(part.expand(least.choices))
            return least.choices
    return ()
