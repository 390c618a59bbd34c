"""Search for the optimum: bound the problem, improve the incumbent, delete strategies that cannot beat it.

Costs are first rounded to a grid (`cost_grid.py`), so that reductions and elimination are exact. If the grid proves too
coarse or too fine for the assignment found, the search runs again on a better grid. At the end a local search
improves the best assignment (`polish.py`).

Each round works on the part of the problem that contains every assignment cheaper than the incumbent:

1. Elimination bounds the part and finds assignments. Without a memory limit and with affordable tables, it finds the
   optimum. With a memory limit, memory gets a price (`memory_dual.py`).
2. The best combination of the strategies seen so far becomes the incumbent, commonly within 0.1 % of the bound.
3. Strategies that appear in no assignment cheaper than the incumbent are deleted. The remaining part is reduced
   again. HiGHS solves it if it is small or no longer shrinks; otherwise another round follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.branch_and_bound import Branched, branch
from autopar.solve.cost_grid import Gridded, on_grid
from autopar.solve.elimination import Elimination, plan_elimination, plan_exact
from autopar.solve.greedy_start import cheap_start
from autopar.solve.instant_thinning import thin
from autopar.solve.live_instants import instants_of
from autopar.solve.memory_dual import Dual, assignments_at_high_prices, price_memory
from autopar.solve.minimum_memory import minimum_memory
from autopar.solve.mip import End
from autopar.solve.polish import polish
from autopar.solve.presolve import Overdue, Reduced, reduce
from autopar.solve.problem import ROUNDING, Edge, Problem, Usage
from autopar.solve.search_budget import Budget

Progress = Callable[[float, float], None]
PROVEN = 1e-6  # relative gap that counts as optimal
_CANCELLED = 1e-12  # rounding error left by cancellation, relative to the sum of absolute values
_COARSE = 0.1 * PROVEN  # a grid's error relative to the cost, above which a finer grid is used
_START_PATIENCE = 2.0  # times the remaining time, for a first assignment
_REDUCE_SHARE = 0.85  # of the remaining time, for the reduction
_LARGEST_TABLE = 1 << 22  # entries: 32 MB
_EXACT_WORK = 5 * 10**8  # entries that elimination may add up: about one second
_LAST_TABLE, _LAST_WORK = 1 << 24, 5 * 10**8  # the same limits for the last attempt before HiGHS
_FIRST_TABLE = 1 << 16  # entries above which the first rounds split a table
_MOST_WORK = 2 * 10**9
_SMALL = 20_000  # edge entries up to which HiGHS solves a part without further rounds
_SHRUNK = 0.8  # a round must shrink the edge entries below this share to be followed by another
_FIT_SHARE = 0.3  # of the remaining time, to find an assignment that fits
_COMBINE_SHARE = 0.3  # of the remaining time, to combine assignments into an incumbent
_SMALL_GAP, _SMALL_GAP_SHARE = 1e-4, 0.05  # below this relative gap HiGHS gets this share of the remaining time
_MIP_SIZE = 200_000  # edge entries up to which HiGHS is tried first under a memory limit
_MIP_SHARE = 0.6  # of the remaining time, for that first try
_LIKELY_SHARES = (0.5, 0.25, 0.12, 0.06, 0.03)  # shares of the strategies to try exact elimination on


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


class Search:
    """The best assignment and the best bound so far of one problem.

    Attributes:
        choices: the cheapest assignment that fits; empty until one is found.
        cost: its cost, in seconds.
        bound: lower bound of the cost of every assignment that fits; `inf` if none fits.
        interrupted: whether Ctrl-C ended the search.
    """

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        progress: Progress | None = None,
        *,
        seed: int = 0,
        relative_gap: float = PROVEN,
    ) -> None:
        self.choices: tuple[int, ...] = ()
        self.cost, self.bound = np.inf, -np.inf
        self._problem, self._budget, self._progress, self._seed = problem, budget, progress, seed
        self._relative_gap = max(relative_gap, PROVEN)
        self._mip_gap = 0.1 * PROVEN if self._relative_gap == PROVEN else 0.9 * self._relative_gap
        self._deadline = budget.deadline
        self._outside = np.inf  # lower bound of assignments outside the current part
        self._grid = Gridded(problem, 0.0, np.inf, False, -np.inf)
        self.interrupted = False
        self._rounds = 0

    @property
    def proven(self) -> bool:
        """Whether the assignment is the optimum."""
        return self._within(PROVEN)

    @property
    def close(self) -> bool:
        """Whether the gap is at most `relative_gap`."""
        return self._within(self._relative_gap)

    def _within(self, relative_gap: float) -> bool:
        if not self.choices:
            return False
        left = self.cost - self.bound
        if left <= relative_gap * abs(self.cost):
            return True
        # Where large costs cancel, the difference carries their rounding error.
        return left <= 2.0 * self._grid.error and left <= _CANCELLED * self._problem.magnitude(self.choices)

    def run(self) -> None:
        """Search until the optimum is proven, the deadline passes or the user interrupts.

        Raises:
            KeyboardInterrupt: if interrupted before anything was found.
        """
        try:
            self._search()
        except KeyboardInterrupt:
            self.interrupted = True
        if self.interrupted and not self.choices:
            raise KeyboardInterrupt
        self._report_progress()

    def _search(self) -> None:
        grid: Gridded | None = on_grid(self._problem)
        self._bound_part(math.nextafter(grid.least, -math.inf))  # first, so that after Ctrl-C there is a bound
        if self._problem.memory_limit is not None:
            self._start()
        try:
            while grid is not None and self._open():
                self._search_on(grid)
                grid = self._better_grid()
        except Overdue:
            if not self.choices:
                self._start()
        if self.choices and self.bound < self.cost and not self.interrupted:
            self._keep(polish(self._problem, self.choices, deadline=self._deadline))

    def _search_on(self, grid: Gridded) -> None:
        """Search the whole problem on one grid."""
        self._grid, self._outside, self._rounds = grid, np.inf, 0
        now = time.monotonic()
        part = self._nonempty(_whole(grid.problem, now + _REDUCE_SHARE * (self._deadline - now)))
        while part is not None and self._open():
            part = self._round(replace(part, deadline=self._deadline))

    def _better_grid(self) -> Gridded | None:
        """A better grid for the cost found; None if the last grid suits it."""
        if not self.choices or not self._open():
            return None
        last, better = self._grid, on_grid(self._problem, self.cost)
        too_fine = self.cost > last.ceiling and better.ceiling > last.ceiling
        too_coarse = last.error > _COARSE * abs(self.cost) and better.error < 0.5 * last.error
        return better if too_fine or too_coarse else None

    def _start(self) -> None:
        """Find some assignment that fits, if any time is left; this may exceed the deadline on a busy machine."""
        now = time.monotonic()
        deadline = now + _START_PATIENCE * (self._deadline - now)
        if now < deadline and (choices := cheap_start(self._problem, deadline=deadline)):
            self._keep(choices)

    def _open(self) -> bool:
        """Whether the gap is still open and time is left."""
        settled = self.close or self.bound == np.inf or self.interrupted
        return not settled and time.monotonic() < self._deadline

    def _report_progress(self) -> None:
        if self._progress is not None:
            self._progress(self.cost, self.bound)

    def _meet(self, part: Part, choices: tuple[int, ...]) -> None:
        """Keep an assignment of a part if it fits and is the cheapest so far."""
        self._keep(part.expand(choices))

    def _keep(self, choices: tuple[int, ...]) -> None:
        cost = self._problem.evaluate(choices)
        if cost < self.cost and self._problem.fits(choices):
            self.choices, self.cost = choices, cost
            self._report_progress()

    def _bound_part(self, bound: float) -> None:
        """Record a lower bound of the current part's assignments that fit (`inf`: none fits)."""
        if bound < np.inf:
            bound = min(bound, self._grid.ceiling) - self._grid.error
        bound = min(bound, self._outside)
        if self._grid.whole and math.isfinite(bound):  # integer costs add up to an integer
            bound = float(math.ceil(bound))
        if bound > self.bound:
            self.bound = bound
            self._report_progress()

    def _nonempty(self, part: Part | None) -> Part | None:
        """The part itself; a part without assignments raises the bound to infinity."""
        if part is None:
            self._bound_part(np.inf)
        return part

    # -- a round -----------------------------------------------------------------------------

    def _round(self, part: Part) -> Part | None:
        """Bound and search a part. Returns what is left to search: None once the part is settled."""
        problem = part.problem
        elimination = plan_exact(problem, max_entries=_LARGEST_TABLE, max_work=_EXACT_WORK)
        if elimination is None and problem.memory_limit is not None:
            if part.size() > _MIP_SIZE:
                return self._search_large(part)
            now = time.monotonic()
            self._bound_part(
                self._branch(
                    part, now + _MIP_SHARE * (self._deadline - now), relative_gap=self._mip_gap, report=self._follow
                ).bound
            )
            if not self._open():
                return None
        if elimination is None:  # larger tables give better bounds but are seldom worth their time in early rounds
            elimination = plan_elimination(problem, max_entries=_FIRST_TABLE << 2 * self._rounds, max_work=_MOST_WORK)
        self._rounds += 1
        choices, bound = elimination.solve(problem.node_costs)
        self._bound_part(bound if elimination.exact else bound - _rounding(problem, bound))
        if bound == np.inf:
            return None
        self._meet(part, choices)
        if not self._open() or (elimination.exact and problem.fits(choices)):
            return None
        if problem.memory_limit is None:
            marginals = elimination.marginals(problem.node_costs)
            rounding = _rounding(problem, bound)
            self._solve_likely(part, marginals, bound)
        else:
            dual = self._price(part, elimination, choices)
            if dual is None or not self._open():
                return self._settle(part)
            marginals = [m + dual.offset for m in elimination.marginals(dual.priced_costs)]
            rounding = _rounding(problem, dual.bound, dual.offset)
        return self._without_costly(part, marginals, rounding) if self._open() else None

    def _without_costly(self, part: Part, marginals: Sequence[np.ndarray], rounding: float) -> Part | None:
        """The part without the strategies that no assignment cheaper than the incumbent uses."""
        cheaper = self.cost - 0.5 * self._relative_gap * abs(self.cost)
        self._outside = min(self._outside, cheaper, self._grid.ceiling - self._grid.error)
        costly = self._outside + self._grid.error + rounding
        left = self._nonempty(part.within([np.flatnonzero(m < costly) for m in marginals]))
        if left is None or _SMALL < left.size() < _SHRUNK * part.size():
            return left
        return self._settle(left)

    def _settle(self, part: Part) -> None:
        """Solve a part to the end: by exact elimination with larger tables, by HiGHS or by the large search."""
        if not self._open():
            return
        if part.problem.memory_limit is None and part.size() > _SMALL:
            elimination = plan_exact(part.problem, max_entries=_LAST_TABLE, max_work=_LAST_WORK)
            if elimination is not None:
                choices, bound = elimination.solve(part.problem.node_costs)
                if bound < np.inf:
                    self._meet(part, choices)
                self._bound_part(bound)
                return
        if part.size() > _MIP_SIZE:
            self._search_large(part)
            return
        now, deadline = time.monotonic(), self._deadline
        if self.cost - self.bound <= _SMALL_GAP * abs(self.cost):
            deadline = now + _SMALL_GAP_SHARE * (deadline - now)
        report = self._follow if self._outside == np.inf else None  # else its bound is not valid for the whole problem
        self._bound_part(self._branch(part, deadline, relative_gap=self._mip_gap, report=report).bound)

    def _follow(self, cost: float, bound: float) -> None:
        if self._progress is not None:
            self._progress(min(cost, self.cost), max(bound, self.bound))

    def _branch(self, part: Part, deadline: float, *, relative_gap: float, report: Progress | None = None) -> Branched:
        result = branch(part.problem, deadline=deadline, relative_gap=relative_gap, report=report)
        self.interrupted |= result.end is End.INTERRUPTED
        if result.choices:
            self._meet(part, result.choices)
        return result

    def _search_large(self, part: Part) -> None:
        """Search a part by message passing and annealing."""
        # Importing numba takes most of a second, and most problems do not need it.
        from autopar.solve.large_search import LargeSearch  # noqa: PLC0415

        least = self.cost

        def improved(cost: float) -> None:  # each thread reports its own best
            nonlocal least
            if cost < least:
                least = cost
                self._follow(cost, self.bound)

        search = LargeSearch(
            part.problem,
            self._budget,
            seed=self._seed,
            found=lambda choices: self._meet(part, choices),
            bounded=self._bound_part,
            open=self._open,
            improved=improved,
            relative_gap=self._mip_gap,
        )
        search.run(lambda: self._fitting_least(part) if part.problem.memory_limit is not None else ())

    def _solve_likely(self, part: Part, marginals: Sequence[np.ndarray], bound: float) -> None:
        """Search for an incumbent among the strategies with the lowest bounds, as many as exact elimination can handle."""
        excess = np.sort(np.concatenate(marginals))
        for share in _LIKELY_SHARES:
            most = max(bound, excess[int(share * (len(excess) - 1))])
            likely = part.within([np.flatnonzero(m <= max(most, m.min())) for m in marginals])
            if likely is None or not self._open():
                continue
            elimination = plan_exact(likely.problem, max_entries=_LARGEST_TABLE, max_work=_EXACT_WORK)
            if elimination is not None:
                self._meet(likely, elimination.solve(likely.problem.node_costs)[0])
                return

    # -- with a memory limit -----------------------------------------------------------------

    def _price(self, part: Part, elimination: Elimination, free: tuple[int, ...]) -> Dual | None:
        """Price memory and collect incumbents on the way; None if no assignment that fits was found."""
        problem, instants = part.problem, instants_of(part.problem)
        seeds = [free, *self._fitting(part, elimination)]
        if len(seeds) == 1:
            return None
        dual = price_memory(problem, instants, elimination, seeds, deadline=self._deadline)
        self._bound_part(dual.bound - _rounding(problem, dual.bound, dual.offset))
        for choices in dual.assignments:
            self._meet(part, choices)
        if self._open() and dual.assignments:
            met = part.within([np.unique(strategies) for strategies in zip(*dual.assignments, strict=True)])
            now = time.monotonic()
            if met is not None:
                self._branch(met, now + _COMBINE_SHARE * (self._deadline - now), relative_gap=1e-4)
        return dual

    def _fitting(self, part: Part, elimination: Elimination) -> list[tuple[int, ...]]:
        """One assignment of the part within the memory limit, in a list; an empty list if none was found."""
        problem = part.problem
        limit = problem.memory_limit
        assert limit is not None
        for choices in assignments_at_high_prices(problem, instants_of(problem), elimination):
            self._meet(part, choices)
            if problem.fits(choices) and np.isfinite(problem.evaluate(choices)):
                return [choices]
        least = self._fitting_least(part)
        return [least] if least else []

    def _fitting_least(self, part: Part) -> tuple[int, ...]:
        """The assignment of a part with the lowest peak memory if it fits; empty if none was found."""
        problem, limit = part.problem, part.problem.memory_limit
        assert limit is not None
        for relative_gap in (5e-3, 1e-6):
            share = _FIT_SHARE * (self._deadline - time.monotonic())
            least = minimum_memory(problem, time_limit_s=share, relative_gap=relative_gap)
            if least.lower_bound > limit * (1 + 1e-6):
                self._bound_part(np.inf)
                break
            if least.choices and problem.fits(least.choices):
                self._meet(part, least.choices)
                return least.choices
        return ()


def _rounding(problem: Problem, *sums: float) -> float:
    """Upper bound of the rounding error of sums over a problem's choices whose terms are off the grid."""
    terms = len(problem.node_costs) + len(problem.edges) + len(problem.usages)
    return 2.0**-50 * terms * sum(abs(s) for s in sums if math.isfinite(s))


def _whole(problem: Problem, deadline: float = math.inf) -> Part | None:
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
