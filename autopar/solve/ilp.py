"""The integer programme: the cheapest assignment of a problem, and proof of it.

    minimise    sum_u c_u . x_u  +  sum_(u,v) C_uv . y_uv
    subject to  1 . x_u = 1                              for every node u          (one strategy)
                y_uv 1 = P_uv x_u,  y_uv' 1 = Q_uv x_v   for every edge (u, v)     (y agrees with x)
                sum_(u live at t) m_u . x_u <= limit     for every instant t       (memory)
                x binary, y >= 0

P and Q class strategies that an edge does not tell apart (`solve/compact_costs.py`). HiGHS solves it (`solve/mip_encoding.py`,
`solve/branch_and_bound.py`), but only what is left of it: reductions that keep the optimum come first (`solve/presolve.py`), then
elimination, prices of memory, and the deletion of strategies that cannot be in the optimum (`solve/exact_search.py`).
Costs are re-evaluated in float64 on the original problem, and its limit is checked there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.solve.exact_search import PROVEN, Search
from autopar.solve.minimum_memory import minimum_memory as minimum_memory
from autopar.solve.problem import Problem, Solution, Status
from autopar.solve.search_budget import Budget

Progress = Callable[[float, float], None]


@dataclass(frozen=True, slots=True)
class Ilp:
    """The exact solver.

    Args:
        time_limit_s: seconds; then the best assignment so far is returned. Ctrl-C does the same.
        progress: called now and then with the best cost and the lower bound, in seconds; perhaps from
            another thread.
        seed: of the random numbers that the search of large problems uses.
        step_limit: of that search, in rounds of message passing and in hundreds of moves of each thread. Where time
            does not run out first, the same seed gives the same answer.
        relative_gap: cost and bound as close as that end the search; by default only proof does. What annealing and
            HiGHS would still find costs them most of their time.
    """

    time_limit_s: float = 60.0
    progress: Progress | None = None
    seed: int = 0
    step_limit: int | None = None
    relative_gap: float = PROVEN

    def solve(self, problem: Problem) -> Solution:
        """The cheapest assignment.

        Returns:
            Its status says what is proven, or what stopped it; with `INFEASIBLE` or `NOT_FOUND` there are no choices.

        Raises:
            KeyboardInterrupt: on Ctrl-C before any assignment was found.
        """
        if not problem.node_costs:
            return Solution((), 0.0, 0.0, Status.OPTIMAL)
        budget = Budget(time.monotonic() + self.time_limit_s, self.step_limit)
        search = Search(problem, budget, self.progress, seed=self.seed, relative_gap=self.relative_gap)
        search.run()
        if not search.choices:
            status = Status.INFEASIBLE if search.bound == np.inf else Status.NOT_FOUND
            return Solution((), np.inf, search.bound, status)
        return Solution(search.choices, search.cost, min(search.bound, search.cost), _status(search, budget))


def _status(search: Search, budget: Budget) -> Status:
    if search.proven:
        return Status.OPTIMAL
    if search.close:
        return Status.CLOSE
    if search.interrupted:
        return Status.INTERRUPTED
    return Status.STEPPED if budget.stepped and not budget.overdue else Status.FEASIBLE
