"""Solve a problem to proven optimality as an integer linear programme (ILP).

    minimise    sum_u c_u . x_u  +  sum_(u,v) C_uv . y_uv
    subject to  1 . x_u = 1                              for every node u          (one strategy)
                y_uv 1 = P_uv x_u,  y_uv' 1 = Q_uv x_v   for every edge (u, v)     (y agrees with x)
                sum_(u live at t) m_u . x_u <= limit     for every instant t       (memory)
                x binary, y >= 0

P and Q map strategies to classes with equal costs on the edge (`compact_costs.py`). Exact reductions come first
(`presolve.py`), then elimination, prices of memory, and the deletion of strategies that cannot be in the optimum
(`exact_search.py`). HiGHS solves what is left (`mip_encoding.py`, `branch_and_bound.py`). The cost of the result is
evaluated again in float64 on the original problem, and its memory limit is checked there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.solve.exact_search import Search
from autopar.solve.incumbent import PROVEN, Incumbent, Progress
from autopar.solve.minimum_memory import minimum_memory as minimum_memory
from autopar.solve.problem import Problem, Solution, Status
from autopar.solve.search_budget import Budget


@dataclass(frozen=True, slots=True)
class Ilp:
    """The exact solver.

    Args:
        time_limit_s: seconds after which the best assignment so far is returned. Ctrl-C does the same.
        progress: callback for the best cost and the lower bound, in seconds; other threads may call it.
        seed: seed of the random numbers in the search of large problems.
        step_limit: limit of that search, in rounds of message passing and in hundreds of moves per thread. If time
            does not run out first, the same seed gives the same result.
        relative_gap: gap between cost and bound that ends the search; the default requires proof of optimality. A
            larger gap saves most of the time of annealing and HiGHS.
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
        best = search.best
        if not best.choices:
            status = Status.INFEASIBLE if best.bound == np.inf else Status.NOT_FOUND
            return Solution((), np.inf, best.bound, status)
        return Solution(best.choices, best.cost, min(best.bound, best.cost), _status(best, budget))


def _status(best: Incumbent, budget: Budget) -> Status:
    if best.proven:
        return Status.OPTIMAL
    if best.close:
        return Status.CLOSE
    if best.interrupted:
        return Status.INTERRUPTED
    return Status.STEPPED if budget.stepped and not budget.overdue else Status.FEASIBLE
