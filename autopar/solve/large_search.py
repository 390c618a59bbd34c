"""Search for a good assignment of a problem too large for elimination and HiGHS.

In: a reduced `Problem` and a `Budget`. Out: assignments and bounds, through callbacks. Message passing with prices of
memory (`memory_multipliers.py`) gives a bound, prices, and assignments that fit or nearly fit. Two threads then improve
the best assignment by simulated annealing over trees (`tree_annealing.py`), each with its own random numbers. Annealing
runs in stages; each stage starts colder, from the best assignment of the stage before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from autopar.solve.certified_bound import certified_bound
from autopar.solve.flat_problem import Pairwise, pairwise
from autopar.solve.instant_loads import loads_of
from autopar.solve.memory_multipliers import Multipliers
from autopar.solve.problem import Problem
from autopar.solve.search_budget import Budget
from autopar.solve.tree_annealing import anneal
from autopar.solve.trws import evaluate

Found = Callable[[tuple[int, ...]], None]
Bounded = Callable[[float], None]
Improved = Callable[[float], None]
_PRICING_SHARE = 0.2  # largest share of the budget for message passing
_PATIENCE = 200  # rounds of message passing without improvement that end it
_BETTER = 1e-5  # relative change that counts as an improvement
_STAGES = ((0.5, 1.0), (0.8, 0.2), (1.0, 0.04))  # share of the annealing budget at its end, factor on the temperature
_HOT, _COLD = 1e-2, 1e-3  # first temperature by the mean cost of a node, last temperature by the first
_LARGEST = 300  # nodes of a tree
_MOVES = 200  # moves between two checks of the budget
_CORES = 2
_LISTEN_S = 0.1
_HOTTER = 5.0  # temperature of the second thread by that of the first


class LargeSearch:
    """One search.

    Args:
        found: callback for each assignment that fits and is the best so far.
        bounded: callback for each better lower bound.
        improved: callback for the cost of an assignment that `found` gets later; other threads call it.
        open: function that returns whether the search should go on.
        relative_gap: gap between cost and bound that ends the search.

    Attributes:
        choices: the best assignment that fits; empty if none was found.
        cost: its cost.
    """

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int,
        found: Found,
        bounded: Bounded,
        improved: Improved,
        open: Callable[[], bool],
        relative_gap: float = 1e-7,
    ) -> None:
        self.problem, self.p = problem, pairwise(problem)
        self.choices = np.zeros(0, np.int64)
        self.cost = np.inf
        self._budget, self._seed = budget, seed
        self._found, self._bounded, self._improved, self._open = found, bounded, improved, open
        self._loads = np.zeros(len(self.p.base))
        self._states: list[_State] = []  # of the current stage of annealing
        self._relative_gap, self._enough = relative_gap, -np.inf  # a cost that ends the search

    def run(self, fitting: Callable[[], tuple[int, ...]]) -> None:
        """Search until the budget is spent.

        Args:
            fitting: function that finds some assignment that fits; called if message passing finds none.
        """
        try:
            prices = self._price()
            if not len(self.choices) and (start := fitting()):
                self._meet(np.array(start, np.int64))
            if len(self.choices) and self._open():
                self._anneal(prices)
        except BaseException:  # stop the annealing threads too
            self._budget.stop()
            raise

    def _price(self) -> Multipliers:
        multipliers = Multipliers(self.p, lambda: self._budget.overdue)
        share = _PRICING_SHARE * (1 - self._budget.spent()) + self._budget.spent()
        try:
            bound, cost, in_vain = -np.inf, np.inf, 0
            while in_vain < _PATIENCE and self._budget.spent() < share and not self._is_close(multipliers.bound):
                multipliers.step(self._meet)
                self._budget.step()
                in_vain += 1
                least = _BETTER * abs(multipliers.bound)
                if multipliers.bound - bound > least or cost - self.cost > least:
                    bound, cost, in_vain = multipliers.bound, self.cost, 0
            if self._budget.spent() < 1.0 and not self._is_close(multipliers.bound) and self._open():
                multipliers.around(self._meet)
                multipliers.lower()
        finally:
            bound = certified_bound(self.p, multipliers.best, multipliers.best_messages)
            self._enough = bound + self._relative_gap * abs(bound)
            self._bounded(bound)
        return multipliers

    def _is_close(self, bound: float) -> bool:
        return self.cost <= bound + self._relative_gap * abs(bound)

    def _meet(self, choices: np.ndarray) -> None:
        cost = evaluate(self.p, self.p.costs, choices)
        if cost < self.cost:
            loads_of(self.p, choices, self._loads)
            if self._loads.max(initial=-np.inf) <= self.p.limit:
                self._found(tuple(choices.tolist()))  # first: after Ctrl-C here the annealing's end meets it again
                self.choices, self.cost = choices.copy(), cost

    # -- annealing -----------------------------------------------------------------------------

    def _anneal(self, prices: Multipliers) -> None:
        try:
            with ThreadPoolExecutor(_CORES, thread_name_prefix="autopar-anneal") as pool:
                try:
                    self._run_stages(pool, prices)
                except BaseException:  # before the pool waits for its threads
                    self._budget.stop()
                    raise
        finally:  # what Ctrl-C kept from the loop, wherever it came
            for state in self._states:
                self._meet(state.best)

    def _run_stages(self, pool: ThreadPoolExecutor, prices: Multipliers) -> None:
        begin = self._budget.spent()
        hot = _HOT * abs(self.cost) / len(self.choices)
        for number, (share, heat) in enumerate(_STAGES):
            if self._budget.spent() >= 1.0 or hot == 0.0 or self.cost <= self._enough:
                break
            end = begin + share * (1 - begin)
            stage = _Stage(self.p, prices.held, self._budget, hot * heat, end, self._improved, self._enough)
            states = [_State(self.choices, self.cost, _HOTTER**i, [self._seed, number, i]) for i in range(_CORES)]
            self._states = states
            tasks = [pool.submit(stage.run, state) for state in states]
            while wait(tasks, timeout=_LISTEN_S).not_done:  # polls, so that Ctrl-C is handled
                pass
            for task in tasks:
                task.result()
            for state in states:
                self._meet(state.best)
                self._budget.step(state.steps)


class _State:
    """One thread's assignment, best assignment, and random numbers."""

    def __init__(self, choices: np.ndarray, cost: float, heat: float, seed: list[int]) -> None:
        self.heat = heat
        self.choices, self.best = choices.copy(), choices.copy()
        self.costs = np.array([cost, cost])
        self.random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
        self.steps = 0


class _Stage:
    """A stage of annealing: the temperature falls from `hot` until the budget is spent up to `end`.

    The stage ends early once a thread finds a cost of at most `enough`.
    """

    def __init__(
        self,
        p: Pairwise,
        held: np.ndarray,
        budget: Budget,
        hot: float,
        end: float,
        improved: Improved,
        enough: float,
    ) -> None:
        self._p, self._held, self._budget, self._hot, self._end, self._improved = p, held, budget, hot, end, improved
        self._enough, self._found = enough, False
        self._begin = budget.spent()

    def run(self, state: _State) -> None:
        """Anneal one thread's assignment."""
        p, loads = self._p, np.zeros(len(self._p.base))
        while not self._found and (spent := self._budget.spent(_CORES * state.steps)) < self._end:
            heat = state.heat * self._hot * _COLD ** max(0.0, (spent - self._begin) / (self._end - self._begin))
            loads_of(p, state.choices, loads)  # recomputed, so that rounding errors do not add up
            state.costs[0] = evaluate(p, p.costs, state.choices)
            anneal(p, self._held, state.choices, state.best, loads, state.costs, state.random, _MOVES, heat, _LARGEST)
            state.steps += 1
            self._improved(float(state.costs[1]))
            if state.costs[1] <= self._enough:
                self._found = (
                    not self._budget.by_steps
                )  # with a step limit the other thread goes on, to stay deterministic
                break
