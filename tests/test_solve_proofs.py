"""The proofs of a solve: near the memory limit, with costs over decades, at its deadline."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from random_problems import faults, near_tight, optimum

from autopar.solve import exact_search as search
from autopar.solve.branch_and_bound import branch
from autopar.solve.ilp import Ilp
from autopar.solve.mip import End
from autopar.solve.polish import polish
from autopar.solve.presolve import delete_forbidden, reduce
from autopar.solve.problem import Edge, Problem, Solution, Status, Usage

Solve = Callable[[Problem], Solution]


def by_highs_alone(problem: Problem) -> Solution:
    allowed = reduce(problem, rules=(delete_forbidden,))
    if allowed is None:
        return Solution((), math.inf, math.inf, Status.INFEASIBLE)
    result = branch(allowed.problem, deadline=time.monotonic() + 60)
    if not result.choices:
        ended = Status.INFEASIBLE if result.end is End.INFEASIBLE else Status.NOT_FOUND
        return Solution((), math.inf, result.bound, ended)
    choices = allowed.expand(result.choices)
    proven = result.cost - result.bound <= 1e-6 * abs(result.cost)
    return Solution(choices, problem.evaluate(choices), result.bound, Status.OPTIMAL if proven else Status.FEASIBLE)


@pytest.fixture(params=["as shipped", "elimination off", "HiGHS alone", "large search"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Solve]]:
    name: str = request.param
    if name == "elimination off":
        for threshold in ("_LARGEST_TABLE", "_LAST_TABLE", "_FIRST_TABLE"):
            monkeypatch.setattr(search, threshold, 6)
        monkeypatch.setattr(search, "_SMALL", 0)
    if name == "large search":
        for threshold in ("_EXACT_WORK", "_LAST_WORK", "_MIP_SIZE", "_SMALL"):
            monkeypatch.setattr(search, threshold, -1)
    solves: dict[str, Solve] = {"HiGHS alone": by_highs_alone, "large search": Ilp(step_limit=24).solve}
    yield name, solves.get(name, Ilp().solve)


def no_false_proof(path: tuple[str, Solve], num_problems: int) -> None:
    name, solve = path
    first = secrets.randbelow(10**9)
    print(f"{name}: seeds {first} to {first + num_problems - 1}")
    for seed in range(first, first + num_problems):
        problem = near_tight(seed)
        assert not faults(problem, solve(problem), must_find=name != "large search"), seed


@pytest.mark.sampled(2)
def test_no_false_proof_where_the_limit_is_all_but_missed(path: tuple[str, Solve]) -> None:
    no_false_proof(path, 80)


@pytest.mark.slow
def test_no_false_proof_in_ten_thousand(path: tuple[str, Solve]) -> None:
    no_false_proof(path, 10_000)


def test_costs_that_a_grid_cannot_distinguish_are_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    for threshold in ("_LARGEST_TABLE", "_LAST_TABLE", "_FIRST_TABLE"):
        monkeypatch.setattr(search, threshold, 6)
    monkeypatch.setattr(search, "_SMALL", 0)
    problem = near_tight(7287)  # the optimum is far above the size that the first grid guesses
    assert not faults(problem, Ilp().solve(problem))


def test_a_grid_keeps_small_costs_next_to_large_ones() -> None:
    """Costs over 24 decades: 1e12 seconds that nobody chooses must not round what is chosen."""
    dear, rng = 1e12, np.random.default_rng(3)
    costs = tuple(np.array([1.0 + 1e-5 * a, 1.0 + 1e-5 * b, dear / 3]) for a, b in rng.random((4, 2)))
    table = np.array([[dear / 7, 1.3e-5, dear], [dear / 7 + 3e-4, dear, dear], [dear, dear, 0.0]])
    problem = Problem(costs, tuple(Edge(n, (n + 1) % 4, table) for n in range(4)))
    solution = Ilp().solve(problem)
    assert solution.cost == pytest.approx(optimum(problem), rel=1e-9)
    assert solution.lower_bound <= solution.cost


def chain(num_nodes: int, seed: int) -> Problem:
    """Whole costs up to 1e12 along a band of neighbours, with memory at a limit that half of what is held meets."""
    rng = np.random.default_rng(seed)
    costs = tuple(rng.integers(0, 10**12, 3).astype(float) for _ in range(num_nodes))
    pairs = [(n, n + 1) for n in range(num_nodes - 1)] + [(n, n + 3) for n in range(0, num_nodes - 3, 5)]
    edges = tuple(Edge(u, v, rng.integers(0, 10**12, (3, 3)).astype(float)) for u, v in pairs)
    if seed % 2:
        return Problem(costs, edges)
    usages = tuple(Usage(n, n, n + 4, rng.integers(0, 10**9, 3).astype(float)) for n in range(0, num_nodes, 40))
    return Problem(costs, edges, usages, 2e9)


def improved(problem: Problem, choices: tuple[int, ...]) -> tuple[int, int]:
    """By how much one change betters an assignment, in whole numbers: of one node, and of two neighbours."""
    around: dict[int, list[Edge]] = {n: [] for n in range(len(choices))}
    for e in problem.edges:
        around[e.source].append(e)
        around[e.target].append(e)

    def cost(changed: dict[int, int]) -> int:
        edges = {id(e): e for n in changed for e in around[n]}
        at = {**{n: choices[n] for e in edges.values() for n in (e.source, e.target)}, **changed}
        return sum(int(problem.node_costs[n][s]) for n, s in changed.items()) + sum(
            int(e.costs[at[e.source], at[e.target]]) for e in edges.values()
        )

    def best(nodes: tuple[int, ...]) -> int:
        now, most = cost({n: choices[n] for n in nodes}), 0
        for new in np.ndindex(*(len(problem.node_costs[n]) for n in nodes)):
            changed = dict(zip(nodes, new, strict=True))
            saved = now - cost(changed)
            if saved > most and problem.fits(tuple(changed.get(n, s) for n, s in enumerate(choices))):
                most = saved
        return most

    pairs = {(e.source, e.target) for e in problem.edges}
    return max(best((n,)) for n in range(len(choices))), max(best(pair) for pair in pairs)


def no_change_betters(num_problems: int) -> None:
    first = secrets.randbelow(10**9)
    print(f"seeds {first} to {first + num_problems - 1}")
    for seed in range(first, first + num_problems):
        problem = chain(1000, seed)
        solution = Ilp(time_limit_s=120.0).solve(problem)
        assert solution.status is Status.OPTIMAL, seed
        assert improved(problem, solution.choices) == (0, 0), seed


def test_no_change_of_one_node_or_two_betters_an_optimum() -> None:
    no_change_betters(2)


@pytest.mark.slow
def test_no_change_of_one_node_or_two_betters_two_hundred_optima() -> None:
    no_change_betters(200)


def test_small_changes_are_found_and_fit() -> None:
    problem = chain(60, 4)
    least = tuple(
        int(min(range(3), key=lambda s: sum(float(u.amounts[s]) for u in problem.usages if u.node == n)))
        for n in range(60)
    )
    assert problem.fits(least)
    better = polish(problem, least, deadline=math.inf)
    assert problem.evaluate(better) < problem.evaluate(least)
    assert problem.fits(better)
    assert improved(problem, better) == (0, 0)


def test_out_of_time_in_the_reduction_there_is_an_assignment_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_REDUCE_SHARE", 0.0)
    problem = chain(400, 2)
    solution = Ilp().solve(problem)
    assert solution.status is Status.FEASIBLE
    assert problem.fits(solution.choices)
    assert 0.0 < solution.lower_bound < solution.cost < math.inf


def test_nothing_found_there_is_still_a_bound() -> None:
    solution = Ilp(time_limit_s=0.0).solve(chain(400, 2))
    assert solution.status is Status.NOT_FOUND
    assert 0.0 < solution.lower_bound < math.inf
