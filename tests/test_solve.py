"""The solver equals exhaustive search, on every path through it."""

from __future__ import annotations

import _thread
import itertools
import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest

from autopar.solve import exact_search as search
from autopar.solve import hash_consing as shared
from autopar.solve.branch_and_bound import branch
from autopar.solve.compact_costs import Table
from autopar.solve.elimination import plan_elimination, plan_exact
from autopar.solve.highs import solve_lp, solve_mip
from autopar.solve.ilp import Ilp, minimum_memory
from autopar.solve.live_instants import instants_of
from autopar.solve.memory_dual import price_memory
from autopar.solve.mip import End, Programme
from autopar.solve.presolve import RULES, delete_forbidden, reduce
from autopar.solve.problem import Edge, Problem, Solution, Status, Usage

KINDS = ("whole numbers", "fractions", "forbidden")


def random_problem(seed: int, kind: str, *, limited: bool, most_nodes: int = 7) -> Problem:
    """A few nodes, parallel edges in both directions, overlapping usages; perhaps nothing finite, or nothing fits."""
    rng = np.random.default_rng([seed, KINDS.index(kind), limited])
    sizes = rng.integers(1, 5, int(rng.integers(1, most_nodes)))

    def costs(*shape: int) -> np.ndarray:
        drawn = rng.integers(0, 6, shape).astype(float)
        if kind == "fractions":
            drawn = rng.random(shape) * 10.0 ** rng.integers(-6, 3)
        return np.where(rng.random(shape) < 0.25, np.inf, drawn) if kind == "forbidden" else drawn

    edges: list[Edge] = []
    for _ in range(int(rng.integers(0, 2 * len(sizes))) if len(sizes) > 1 else 0):
        u, v = (int(n) for n in rng.choice(len(sizes), 2, replace=False))
        edges.append(Edge(u, v, costs(sizes[u], sizes[v])))
        if rng.random() < 0.3:
            edges.append(Edge(v, u, costs(sizes[v], sizes[u])))
    usages: list[Usage] = []
    for _ in range(int(rng.integers(1, 2 * len(sizes) + 1))):
        node = int(rng.integers(len(sizes)))
        start, end = sorted(int(t) for t in rng.integers(0, 8, 2))
        usages.append(Usage(node, start, end, rng.integers(0, 10, sizes[node]).astype(float)))
    problem = Problem(tuple(costs(n) for n in sizes), tuple(edges), tuple(usages))
    if not limited:
        return problem
    peaks = [problem.peak_memory(tuple(int(rng.integers(n)) for n in sizes)) for _ in range(3)]
    return replace(problem, memory_limit=float(rng.choice(peaks)) - float(rng.integers(0, 2)))


def layered_problem(num_layers: int, *, seed: int = 0, limit: float | None = None) -> Problem:
    """Equal layers around a hub, as of a transformer: each node has a few shardings that several strategies share."""
    rng = np.random.default_rng(seed)
    classes = [np.arange(6) % 3, np.arange(6) // 2, np.arange(6) % 2 * 2]
    resharding = rng.integers(0, 8, (3, 3)).astype(float) * (1 - np.eye(3))
    layer_costs = [rng.integers(1, 9, 6).astype(float) for _ in range(6)]
    layer_edges = [(0, 1), (0, 2), (1, 3), (2, 3), (1, 4), (3, 4), (3, 5), (0, 5)]
    matrices = [resharding[classes[i % 3][:, None], classes[(i + 1) % 3]] for i in range(len(layer_edges))]
    to_hub = resharding[classes[0][:, None], classes[0]]
    costs, edges, usages = [np.arange(6.0)], [], []
    for layer in range(num_layers):
        first = len(costs)
        costs += layer_costs
        edges += [Edge(first + u, first + v, c) for (u, v), c in zip(layer_edges, matrices, strict=True)]
        edges += [Edge(0, first, to_hub), Edge(first + 5, 0, to_hub.T)]
        usages += [
            Usage(first + n, layer * 6 + n, 12 * num_layers - layer * 6 - n, 12.0 // (1 + classes[n % 3]))
            for n in range(6)
        ]
    return Problem(tuple(costs), tuple(edges), tuple(usages), limit)


def assert_optimal(solution: Solution, problem: Problem, expected: Solution) -> None:
    assert solution.status is expected.status
    assert solution.cost == pytest.approx(expected.cost, rel=1e-6)
    assert solution.lower_bound <= expected.cost * (1 + 1e-9) + 1e-12
    if expected.choices:
        assert solution.cost == problem.evaluate(solution.choices)
        assert problem.fits(solution.choices)
        assert solution.gap <= 1e-6 or solution.cost == pytest.approx(solution.lower_bound)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_exhaustive_search(kind: str, limited: bool, seed: int) -> None:
    problem = random_problem(seed, kind, limited=limited)
    assert_optimal(Ilp().solve(problem), problem, oracles.exhaustive(problem))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("last_table", [6, 1 << 20])
def test_equals_exhaustive_search_where_elimination_is_too_dear(
    seed: int, limited: bool, last_table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LARGEST_TABLE", 6)
    monkeypatch.setattr(search, "_LAST_TABLE", last_table)
    monkeypatch.setattr(search, "_FIRST_TABLE", 6)
    monkeypatch.setattr(search, "_SMALL", 0)
    problem = random_problem(seed, "fractions", limited=limited, most_nodes=9)
    assert_optimal(Ilp().solve(problem), problem, oracles.exhaustive(problem))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", KINDS)
def test_highs_alone_equals_exhaustive_search(kind: str, seed: int) -> None:
    problem = random_problem(seed, kind, limited=True)
    assert problem.memory_limit is not None
    problem = replace(problem, memory_limit=max(0.0, problem.memory_limit))
    expected = oracles.exhaustive(problem)
    allowed = reduce(problem, rules=(delete_forbidden,))
    if allowed is None:
        assert not expected.choices
        return
    result = branch(allowed.problem, deadline=time.monotonic() + 60)
    assert result.end is (End.OPTIMAL if expected.choices else End.INFEASIBLE)
    assert result.cost == pytest.approx(expected.cost, rel=1e-6)


@pytest.mark.parametrize(
    "rules", [(rule,) for rule in RULES] + [RULES[:2], RULES], ids=lambda rules: "+".join(r.__name__ for r in rules)
)
@pytest.mark.parametrize("limited", [False, True])
def test_reductions_keep_the_optimum(rules: Any, limited: bool) -> None:
    for seed in range(40):
        problem = random_problem(seed, KINDS[seed % 3], limited=limited)
        expected = oracles.exhaustive(problem)
        reduced = reduce(problem, rules=rules)
        if reduced is None:
            assert not oracles.exhaustive(replace(problem, memory_limit=None)).choices
            continue
        found = oracles.exhaustive(reduced.problem)
        assert found.cost == pytest.approx(expected.cost)
        if found.choices:
            choices = reduced.expand(found.choices)
            assert problem.evaluate(choices) == pytest.approx(expected.cost)
            assert problem.fits(choices)


def test_a_node_that_follows_another_is_merged_into_it() -> None:
    same = np.where(np.eye(3, dtype=bool), 0.0, np.inf)
    usages = (Usage(0, 0, 2, np.array([3.0, 2.0, 1.0])), Usage(1, 1, 3, np.array([3.0, 2.0, 1.0])))
    problem = Problem((np.array([0.0, 1.0, 5.0]),) * 2, (Edge(0, 1, same),), usages, 4.0)
    reduced = reduce(problem)
    assert reduced is not None and len(reduced.kept) <= 1
    assert Ilp().solve(problem).choices == (1, 1)


def test_a_table_is_its_matrix() -> None:
    rng = np.random.default_rng(0)
    costs = rng.integers(0, 2, (6, 4)).astype(float)[rng.integers(0, 6, 20)][:, rng.integers(0, 4, 15)]
    table = Table.of(costs)
    assert table.core.size < costs.size
    np.testing.assert_array_equal(table.dense(), costs)
    np.testing.assert_array_equal(table.plus(table.transposed().transposed()).dense(), 2 * costs)
    shifted = costs + np.arange(20)[:, None]
    normal, of_rows, of_columns = Table.of(shifted).normalised()
    np.testing.assert_allclose(normal.dense() + of_rows[:, None] + of_columns, shifted)
    assert normal.dense().min(axis=0).max() == normal.dense().min(axis=1).max() == 0.0


def test_equal_tables_are_one_and_different_ones_are_not() -> None:
    tables = shared.SharedTables()
    zero, core = np.zeros((1, 2)), np.array([[0.0, 1.0]])
    wide = Table(np.array([0]), np.array([0, 0, 1]), core)
    tall = Table(np.array([0, 0]), np.array([0, 1]), core)  # the same bytes one after the other
    assert tables.one(wide) is not tables.one(tall)
    assert tables.one(Table(wide.rows.copy(), wide.cols.copy(), core.copy())) is tables.one(wide)
    assert tables.one(Table(wide.rows, wide.cols, zero)) is not tables.one(wide)
    assert tables.transposed(tables.transposed(tables.one(wide))) is tables.one(wide)
    with pytest.raises(ZeroDivisionError):  # the argument is what counts, not that it was asked before
        tables.once("x", [tables.one(tall)], [], lambda: 1 // tables.once("x", [tables.one(wide)], [], lambda: 0))
    assert tables.once("x", [tables.one(wide)], [], lambda: 1) == 0


@pytest.mark.parametrize("limit", [None, 150.0])
@pytest.mark.parametrize("most_bytes", [0, 1_000, 1 << 28])
def test_reduction_is_the_same_whatever_is_kept(
    limit: float | None, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_MOST_BYTES", most_bytes)
    problem = layered_problem(4, limit=limit)
    apart = replace(problem, edges=tuple(replace(e, costs=e.costs.copy()) for e in problem.edges))
    one, other = reduce(problem), reduce(apart)
    monkeypatch.undo()
    expected = Ilp().solve(problem)
    assert one is not None and other is not None
    assert one.kept == other.kept
    for reduced in (one, other):
        choices = Ilp().solve(reduced.problem).choices
        assert problem.evaluate(reduced.expand(choices)) == pytest.approx(expected.cost)
        assert problem.fits(reduced.expand(choices))


def brute_marginals(problem: Problem) -> list[np.ndarray]:
    marginals = [np.full(len(c), np.inf) for c in problem.node_costs]
    for choices in np.ndindex(*(len(c) for c in problem.node_costs)):
        for node, choice in enumerate(choices):
            marginals[node][choice] = min(marginals[node][choice], problem.evaluate(choices))
    return marginals


@pytest.mark.parametrize("kind", KINDS)
def test_elimination_finds_the_optimum_and_every_marginal(kind: str) -> None:
    for seed in range(30):
        problem = random_problem(seed, kind, limited=False)
        elimination = plan_exact(problem, max_entries=1 << 20, max_work=1 << 30)
        assert elimination is not None and elimination.exact
        expected = oracles.exhaustive(problem)
        choices, value = elimination.solve(problem.node_costs)
        assert value == pytest.approx(expected.cost)
        if expected.choices:
            assert problem.evaluate(choices) == pytest.approx(expected.cost)
            for got, brute in zip(elimination.marginals(problem.node_costs), brute_marginals(problem), strict=True):
                np.testing.assert_allclose(got, brute)


@pytest.mark.parametrize("max_entries", [1, 3, 6])
def test_split_elimination_bounds_the_optimum_and_every_marginal(max_entries: int) -> None:
    split = 0
    for seed in range(40):
        problem = random_problem(seed, "fractions", limited=False, most_nodes=9)
        elimination = plan_elimination(problem, max_entries=max_entries, max_work=1 << 30)
        split += not elimination.exact
        expected = oracles.exhaustive(problem)
        choices, bound = elimination.solve(problem.node_costs)
        assert bound <= expected.cost * (1 + 1e-9) <= problem.evaluate(choices) * (1 + 2e-9)
        for got, brute in zip(elimination.marginals(problem.node_costs), brute_marginals(problem), strict=True):
            assert (got <= brute * (1 + 1e-9) + 1e-12).all()
            assert (got >= bound - 1e-9 * abs(bound) - 1e-12).all()
    assert split > 0


def test_prices_of_memory_bound_the_optimum() -> None:
    for seed in range(20):
        problem = random_problem(seed, "fractions", limited=True)
        expected = oracles.exhaustive(problem)
        elimination = plan_exact(problem, max_entries=1 << 20, max_work=1 << 30)
        assert elimination is not None
        if expected.choices:
            free, _ = elimination.solve(problem.node_costs)
            seeds = [free, expected.choices]
            dual = price_memory(problem, instants_of(problem), elimination, seeds, deadline=math.inf)
            assert dual.bound <= expected.cost * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_layers_around_a_hub(share: float) -> None:
    """Elimination, prices and deletion against HiGHS alone."""
    free = layered_problem(4)
    unlimited = Ilp().solve(free)
    least = minimum_memory(free)
    assert unlimited.status is Status.OPTIMAL
    limit = math.ceil(least.peak_bytes + share * (free.peak_memory(unlimited.choices) - least.peak_bytes))
    problem = layered_problem(4, limit=float(limit))
    solution = Ilp().solve(problem)
    alone = branch(problem, deadline=time.monotonic() + 60)
    assert solution.cost == pytest.approx(alone.cost, rel=1e-6)
    assert problem.peak_memory(solution.choices) <= limit
    assert solution.status is Status.OPTIMAL


def test_least_memory_is_reached_and_never_undercut() -> None:
    for seed in range(60):
        problem = random_problem(seed, KINDS[seed % 3], limited=False)
        expected = oracles.least_memory(problem)
        least = minimum_memory(problem)
        assert least.lower_bound <= expected * (1 + 1e-6)
        assert least.peak_bytes == pytest.approx(expected, rel=0.01)
        if least.choices:
            assert problem.peak_memory(least.choices) == least.peak_bytes
            assert math.isfinite(problem.evaluate(least.choices))


def test_the_contest_example(shared_dir: Path) -> None:
    given = json.loads((shared_dir / "iopddl" / "example.json").read_text())["problem"]
    costs = tuple(np.array(c, float) for c in given["nodes"]["costs"])
    sides = zip(given["edges"]["nodes"], given["edges"]["costs"], strict=True)
    edges = tuple(Edge(u, v, np.array(c, float).reshape(len(costs[u]), -1)) for (u, v), c in sides)
    held = zip(given["nodes"]["intervals"], given["nodes"]["usages"], strict=True)
    usages = tuple(Usage(n, start, end, np.array(m, float)) for n, ((start, end), m) in enumerate(held))
    problem = Problem(costs, edges, usages, given["usage_limit"])
    assert problem.evaluate((0, 1, 2, 0, 0)) == 495
    assert not problem.fits((0, 0, 1, 1, 0))
    solution = Ilp().solve(problem)
    assert (solution.choices, solution.cost, solution.status) == ((0, 0, 2, 1, 0), 445, Status.OPTIMAL)


# -- how a solve ends --------------------------------------------------------------------------


def knapsack(num_nodes: int = 150, num_instants: int = 20) -> Problem:
    """Many small trade-offs under many limits at once: easy to fit, out of reach to prove."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1000, (num_instants, num_nodes)).astype(float)
    usages = [Usage(n, 2 * t, 2 * t + 1, np.array([m, 0.0])) for t, row in enumerate(sizes) for n, m in enumerate(row)]
    costs = tuple(np.array([0.0, c]) for c in sizes.sum(axis=0) + rng.random(num_nodes) * 100)
    return Problem(costs, (), tuple(usages), float(sizes.sum(axis=1).min() / 2))


def test_nothing_to_decide_is_decided() -> None:
    assert Ilp().solve(Problem((), ())) == Solution((), 0.0, 0.0, Status.OPTIMAL)


def test_nothing_fits() -> None:
    problem = Problem((np.zeros(2),), (), (Usage(0, 0, 1, np.array([3.0, 2.0])),), 1.0)
    solution = Ilp().solve(problem)
    assert (solution.choices, solution.status, solution.gap) == ((), Status.INFEASIBLE, math.inf)
    assert math.isinf(solution.cost)


def test_nothing_is_allowed() -> None:
    forbidden = Edge(0, 1, np.full((2, 2), np.inf))
    assert Ilp().solve(Problem((np.zeros(2), np.zeros(2)), (forbidden,))).status is Status.INFEASIBLE
    assert Ilp().solve(Problem((np.zeros(0),))).status is Status.INFEASIBLE
    assert minimum_memory(Problem((np.full(2, np.inf),))).peak_bytes == math.inf


def test_no_time_at_all() -> None:
    solution = Ilp(time_limit_s=0.0).solve(knapsack())
    assert (solution.choices, solution.status) == ((), Status.NOT_FOUND)


@pytest.mark.slow
def test_too_little_time_for_a_proof() -> None:
    problem = knapsack()
    reports: list[tuple[float, float]] = []
    solution = Ilp(time_limit_s=8.0, progress=lambda cost, bound: reports.append((cost, bound))).solve(problem)
    assert solution.status is Status.FEASIBLE
    assert problem.fits(solution.choices)
    assert 1e-6 < solution.gap < 1
    assert reports[-1] == pytest.approx((solution.cost, solution.lower_bound))
    costs, bounds = zip(*reports, strict=True)  # what is reported holds: it only ever gets better
    rounding = 1e-6 * solution.cost  # HiGHS's log is read, with its few digits
    assert all(later <= earlier + rounding for earlier, later in itertools.pairwise(costs))
    assert all(later >= earlier - rounding for earlier, later in itertools.pairwise(bounds))
    assert min(costs) >= solution.cost - rounding
    assert max(bounds) <= solution.lower_bound + rounding


def test_interrupted_it_keeps_the_best_so_far(uncollected: None) -> None:
    problem = knapsack()
    met = threading.Event()

    def interrupt(cost: float, bound: float) -> None:
        if math.isfinite(cost) and not met.is_set():
            met.set()
            threading.Timer(1.0, _thread.interrupt_main).start()

    solution = Ilp(time_limit_s=600.0, progress=interrupt).solve(problem)  # never reached
    assert solution.status is Status.INTERRUPTED
    assert problem.fits(solution.choices)


def test_an_error_in_a_progress_report_is_raised() -> None:
    def report(cost: float, bound: float) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        branch(knapsack(), deadline=time.monotonic() + 2, report=report)


def test_highs_left_behind_gives_its_last_solution(uncollected: None) -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 1000, (20, 60)).astype(float)
    rows, columns = np.indices(weights.shape).reshape(2, -1)
    programme = Programme(
        objective=-weights.sum(axis=0) - rng.random(60),
        integer=np.ones(60, bool),
        rows=rows,
        columns=columns,
        coefficients=weights.ravel(),
        row_least=np.full(20, -np.inf),
        row_most=weights.sum(axis=1) / 2,
    )
    reports: list[float] = []

    def interrupt(objective: float, bound: float) -> None:  # at a second sign of life with a solution
        reports.extend([objective] if math.isfinite(objective) else [])
        if len(reports) == 2:
            _thread.interrupt_main()

    outcome = solve_mip(programme, time_limit_s=math.inf, report=interrupt)
    assert outcome.end is End.INTERRUPTED
    assert outcome.values is not None
    assert (weights @ outcome.values <= programme.row_most * (1 + 1e-6)).all()
    assert outcome.bound <= programme.objective @ outcome.values < 0


def test_a_linear_programme_and_its_duals() -> None:
    none, one = np.zeros(3, int), np.ones(3)
    programme = Programme(
        -np.arange(1.0, 4.0), np.zeros(3, bool), none, np.arange(3), one, np.full(1, -np.inf), np.ones(1)
    )
    solved = solve_lp(programme)
    assert solved is not None
    np.testing.assert_allclose(solved[0], [0, 0, 1])
    assert -3 <= solved[1][0] <= -2


def test_a_byte_too_many_is_too_many() -> None:
    """HiGHS overlooks a violation of one part in 10^10; the solver does not."""
    amounts = np.array([40e9 + 1, 40e9, 30e9])
    usages = tuple(Usage(n, 0, 1, amounts) for n in range(2))
    problem = Problem((np.array([0.0, 1.0, 5.0]),) * 2, (), usages, 80e9)
    for solution in (Ilp().solve(problem), branch(problem, deadline=math.inf)):
        assert (solution.choices, solution.cost) == ((1, 1), 2.0)


def test_the_same_problem_has_the_same_solution() -> None:
    problems = [layered_problem(3, limit=float(limit)) for limit in (150, 150)]
    first, second = (Ilp().solve(p) for p in problems)
    assert first == second


# -- random strategies -------------------------------------------------------------------------


def test_random_assignments_are_allowed_and_fit() -> None:
    problem = layered_problem(2, limit=100.0)
    drawn = [oracles.RandomSolver(seed).solve(problem).choices for seed in range(4)]
    assert all(math.isfinite(problem.evaluate(c)) and problem.fits(c) for c in drawn)
    assert len(set(drawn)) == 4
    assert oracles.RandomSolver(0).solve(problem).choices == drawn[0]
