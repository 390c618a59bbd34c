"""The integer programme: the cheapest assignment of a problem, and proof of it.

    minimise    sum_u c_u . x_u  +  sum_(u,v) C_uv . y_uv
    subject to  1 . x_u = 1                              for every node u          (one strategy)
                y_uv 1 = P_uv x_u,  y_uv' 1 = Q_uv x_v   for every edge (u, v)     (y agrees with x)
                sum_(u live at t) m_u . x_u <= limit     for every instant t       (memory)
                x binary, y >= 0

P and Q class strategies that an edge does not tell apart (`table.py`). HiGHS solves it (`programme.py`,
`branch.py`), but only what is left of it: reductions that keep the optimum come first (`reduction.py`), then
elimination, prices of memory, and the deletion of strategies that cannot be in the optimum (`search.py`).
Costs are re-evaluated in float64 on the original problem, and its limit is checked there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.solve.memory import minimum_memory as minimum_memory
from autopar.solve.problem import Problem, Solution, Status
from autopar.solve.search import Search

Progress = Callable[[float, float], None]


@dataclass(frozen=True, slots=True)
class Ilp:
    """The exact solver.

    Args:
        time_limit_s: seconds; then the best assignment so far is returned. Ctrl-C does the same.
        progress: called now and then with the best cost and the lower bound, in seconds; perhaps from
            another thread.
    """

    time_limit_s: float = 60.0
    progress: Progress | None = None

    def solve(self, problem: Problem) -> Solution:
        """The cheapest assignment.

        Returns:
            Its status says what is proven; with `INFEASIBLE` or `NOT_FOUND` there are no choices.

        Raises:
            KeyboardInterrupt: on Ctrl-C before any assignment was found.
        """
        search = Search(problem, time.monotonic() + self.time_limit_s, self.progress)
        search.run()
        if not search.choices:
            status = Status.INFEASIBLE if search.bound == np.inf else Status.NOT_FOUND
            return Solution((), np.inf, search.bound, status)
        status = Status.OPTIMAL if search.proven else Status.FEASIBLE
        return Solution(search.choices, search.cost, min(search.bound, search.cost), status)
