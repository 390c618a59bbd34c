"""The search of large problems, and the guarantees of every solve, against exhaustive search."""

from __future__ import annotations

import _thread
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import oracles
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.solve import exact_search as search
from autopar.solve.certified_bound import certified_bound
from autopar.solve.flat_problem import pairwise
from autopar.solve.ilp import Ilp
from autopar.solve.instant_loads import loads_of, price
from autopar.solve.instant_thinning import thin
from autopar.solve.large_search import LargeSearch
from autopar.solve.live_instants import instants_of
from autopar.solve.presolve import delete_forbidden, reduce
from autopar.solve.problem import Edge, Problem, Solution, Status, Usage
from autopar.solve.search_budget import Budget
from autopar.solve.trws import evaluate, sweep

numbers = st.one_of(st.integers(0, 9).map(float), st.floats(0, 1e3), st.floats(0, 1e-6))


@st.composite
def problems(draw: st.DrawFn, *, most_nodes: int = 6, forbidden: bool = True) -> Problem:
    """Nodes, edges in both directions, equalities, forbidden pairs, overlapping usages, perhaps a limit."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most_nodes))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    scale = 10.0 ** draw(st.integers(-6, 6))

    def costs(*shape: int) -> np.ndarray:
        whole = draw(st.booleans())
        drawn = rng.integers(0, 6, shape).astype(float) if whole else rng.random(shape) * scale
        return np.where(rng.random(shape) < 0.2, np.inf, drawn) if forbidden and draw(st.booleans()) else drawn

    edges: list[Edge] = []
    for _ in range(draw(st.integers(0, 2 * len(sizes))) if len(sizes) > 1 else 0):
        u, v = (int(n) for n in rng.choice(len(sizes), 2, replace=False))
        alias = forbidden and sizes[u] == sizes[v] and draw(st.booleans())
        matrix = np.where(np.eye(sizes[u], dtype=bool), 0.0, np.inf) if alias else costs(sizes[u], sizes[v])
        edges.append(Edge(u, v, matrix))
    usages: list[Usage] = []
    for _ in range(draw(st.integers(0, 2 * len(sizes)))):
        node = int(rng.integers(len(sizes)))
        start, end = sorted(int(t) for t in rng.integers(0, 8, 2))
        usages.append(Usage(node, start, end, rng.integers(0, 10, sizes[node]).astype(float)))
    problem = Problem(tuple(costs(n) for n in sizes), tuple(edges), tuple(usages))
    if draw(st.booleans()):
        return problem
    peak = problem.peak_memory(tuple(int(rng.integers(n)) for n in sizes))
    return replace(problem, memory_limit=peak - draw(st.integers(0, 2)))


def sound(solution: Solution, problem: Problem, expected: Solution) -> None:
    """bound <= optimum <= incumbent, the incumbent fits, and the status is true."""
    rounding = 1e-9 * abs(expected.cost) if expected.choices else 0.0
    assert solution.lower_bound <= expected.cost + rounding
    if solution.choices:
        assert solution.cost == problem.evaluate(solution.choices)
        assert solution.cost >= expected.cost - rounding
        assert problem.fits(solution.choices)
        assert math.isfinite(solution.cost)
    if solution.status is Status.OPTIMAL:
        assert solution.cost <= expected.cost * (1 + 2e-6) + rounding
    if solution.status is Status.INFEASIBLE:
        assert not expected.choices


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(3))
@settings(max_examples=500, deadline=None)
@given(problem=problems())
def test_any_small_problem_is_solved_as_by_trying_everything(part: int, problem: Problem) -> None:
    expected = oracles.exhaustive(problem)
    solution = Ilp().solve(problem)
    sound(solution, problem, expected)
    assert solution.status is expected.status


@settings(max_examples=300, deadline=None)
@given(problems())
def test_memory_at_fewer_instants_is_the_same_limit(problem: Problem) -> None:
    thinned = thin(problem)
    assert len(instants_of(thinned).times) <= len(instants_of(problem).times)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choices = tuple(int(rng.integers(len(c))) for c in problem.node_costs)
        assert thinned.fits(choices) == problem.fits(choices)


# -- messages and bounds -------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(3))
@settings(max_examples=100, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**32), passes=st.integers(0, 6))
def test_a_bound_holds_at_any_prices_and_after_any_number_of_passes(
    part: int, problem: Problem, seed: int, passes: int
) -> None:
    reduced = reduce(problem, rules=(delete_forbidden,))
    if reduced is None:
        return
    expected = oracles.exhaustive(problem)
    p = pairwise(reduced.problem)
    rng = np.random.default_rng(seed)
    multipliers = rng.random(len(p.base)) * rng.integers(0, 2, len(p.base))
    held = np.zeros(len(p.costs))
    price(p, multipliers, held)
    messages = np.zeros(p.num_messages)
    for i in range(2 * passes):
        sweep(p, p.costs + held, messages, i % 2 == 0)
    assert certified_bound(p, multipliers, messages) <= expected.cost


def test_the_bound_of_a_tree_is_its_optimum() -> None:
    rng = np.random.default_rng(0)
    costs = tuple(rng.random(4) for _ in range(7))
    edges = tuple(Edge((n - 1) // 2, n, rng.random((4, 4))) for n in range(1, 7))
    problem = Problem(costs, edges)
    p = pairwise(problem)
    messages, bound = np.zeros(p.num_messages), -math.inf
    for i in range(20):
        bound = sweep(p, p.costs, messages, i % 2 == 0)
    assert bound == pytest.approx(oracles.exhaustive(problem).cost)
    certified = certified_bound(p, np.zeros(0), messages)
    assert bound - 1e-9 < certified <= bound


@settings(max_examples=200, deadline=None)
@given(problems())
def test_laid_out_flat_it_is_the_same_problem(problem: Problem) -> None:
    reduced = reduce(problem, rules=(delete_forbidden,))
    if reduced is None:
        return
    q = reduced.problem
    p = pairwise(q)
    times = instants_of(q).times
    rng = np.random.default_rng(0)
    for _ in range(5):
        choices = np.array([rng.integers(len(c)) for c in q.node_costs])
        assert evaluate(p, p.costs, choices) == pytest.approx(q.evaluate(tuple(choices)), rel=1e-12, abs=1e-12)
        if q.memory_limit is not None:
            loads = np.zeros(len(times))
            loads_of(p, choices, loads)
            assert (loads.max(initial=-np.inf) <= q.memory_limit) == q.fits(tuple(choices)) or not len(times)


# -- the search ------------------------------------------------------------------------------------


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither elimination nor HiGHS takes anything."""
    for name in ("_EXACT_WORK", "_LAST_WORK", "_MIP_SIZE", "_SMALL"):
        monkeypatch.setattr(search, name, -1)
    yield


def ring(num_nodes: int = 40, *, seed: int = 0, share: float = 0.6) -> Problem:
    """Nodes in a ring with chords, each holding memory for a while; the limit is a share of what the free optimum has."""
    rng = np.random.default_rng(seed)
    costs = tuple(rng.integers(0, 50, 5).astype(float) for _ in range(num_nodes))
    pairs = [(n, (n + 1) % num_nodes) for n in range(num_nodes)] + [(n, (n + 7) % num_nodes) for n in range(num_nodes)]
    edges = tuple(Edge(u, v, rng.integers(0, 40, (5, 5)).astype(float)) for u, v in pairs)
    usages = tuple(Usage(n, n, n + 12, 10 + 10.0 * rng.permutation(5)) for n in range(num_nodes))
    problem = Problem(costs, edges, usages)
    peak = max(problem.peak_memory(tuple(int(c.argmin()) for c in costs)), 1.0)
    return replace(problem, memory_limit=float(round(share * peak)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(most_nodes=5), seed=st.integers(0, 3))
def test_the_search_of_large_problems_is_sound(
    everything_is_large: None, part: int, problem: Problem, seed: int
) -> None:
    solution = Ilp(seed=seed, step_limit=24).solve(problem)
    sound(solution, problem, oracles.exhaustive(problem))


def test_it_comes_close_to_the_optimum_of_a_ring(everything_is_large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ring(14)
    found = Ilp(step_limit=60).solve(problem)
    monkeypatch.undo()
    exact = Ilp().solve(problem)
    assert exact.status is Status.OPTIMAL
    assert exact.cost <= found.cost <= 1.1 * exact.cost
    assert 0.8 * exact.cost <= found.lower_bound <= exact.cost


def test_the_same_seed_gives_the_same_answer(everything_is_large: None) -> None:
    problem = ring(60)
    answers = [Ilp(seed=seed, step_limit=40).solve(problem) for seed in (1, 1, 2, 3)]
    assert answers[0] == answers[1]
    assert answers[0].status is Status.STEPPED
    assert all(problem.fits(a.choices) for a in answers)


def grid(side: int = 7, num_strategies: int = 5, *, seed: int = 0) -> Problem:
    """Nodes in a square, each with edges to its neighbours, and costs between 0 and 1."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(side * side).reshape(side, side)
    across, down = (numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])
    pairs = [pair for one, next_ in (across, down) for pair in zip(one.flat, next_.flat, strict=True)]
    edges = tuple(Edge(int(u), int(v), rng.random((num_strategies, num_strategies))) for u, v in pairs)
    return Problem(tuple(rng.random(num_strategies) for _ in range(side * side)), edges)


@pytest.mark.parametrize("rounds_help", [True, False])
def test_larger_tables_come_before_the_large_search(monkeypatch: pytest.MonkeyPatch, *, rounds_help: bool) -> None:
    problem, searches = grid(), list[LargeSearch]()
    optimum = Ilp().solve(problem)
    assert optimum.status is Status.OPTIMAL
    monkeypatch.setattr(search, "plan_exact", lambda *_, **__: None)
    limits = {"_SMALL": 0, "_MIP_SIZE": 0, "_FIRST_TABLE": 5, "_NARROWED": 1.0 if rounds_help else 0.0}
    for name, value in limits.items():
        monkeypatch.setattr(search, name, value)
    run = LargeSearch.run
    monkeypatch.setattr(LargeSearch, "run", lambda self, least: (searches.append(self), run(self, least))[1])
    found = Ilp(time_limit_s=30.0, step_limit=20).solve(problem)
    assert bool(searches) is not rounds_help
    assert math.isclose(found.cost, optimum.cost, rel_tol=1e-9) or not rounds_help
    assert found.lower_bound <= optimum.cost * (1 + 1e-9)


def test_the_status_says_that_time_ran_out(everything_is_large: None) -> None:
    assert Ilp(time_limit_s=2.0).solve(ring(60)).status is Status.FEASIBLE


@settings(max_examples=400, deadline=None)
@given(problem=problems(), relative_gap=st.sampled_from([0.01, 0.1, 0.5]))
def test_the_requested_gap_is_kept(problem: Problem, relative_gap: float) -> None:
    expected = oracles.exhaustive(problem)
    solution = Ilp(relative_gap=relative_gap).solve(problem)
    sound(solution, problem, expected)
    assert bool(solution.choices) == bool(expected.choices)
    if solution.choices:
        assert solution.status in (Status.OPTIMAL, Status.CLOSE)
        assert solution.gap <= relative_gap + 1e-9


def test_a_large_search_ends_at_the_requested_gap(everything_is_large: None) -> None:
    problem = ring(60)
    limit_s = 60.0
    began = time.monotonic()
    solution = Ilp(time_limit_s=limit_s, relative_gap=0.8).solve(problem)
    assert time.monotonic() - began < limit_s
    assert solution.status is Status.CLOSE
    assert 1e-6 < solution.gap <= 0.8
    assert problem.fits(solution.choices)
    by_steps = [Ilp(seed=seed, step_limit=40, relative_gap=0.8).solve(problem) for seed in (1, 1)]
    assert by_steps[0] == by_steps[1]


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3, 1.0])
def test_interrupted_at_any_moment_it_has_a_valid_assignment_or_says_none(
    everything_is_large: None, uncollected: None, delay_s: float
) -> None:
    problem = ring(60)
    Ilp(step_limit=10).solve(problem)  # so that all is compiled
    reports: list[float] = []

    def interrupt_later() -> None:
        time.sleep(delay_s)
        _thread.interrupt_main()

    _thread.start_new_thread(interrupt_later, ())
    try:
        solution = Ilp(progress=lambda cost, bound: reports.append(cost)).solve(problem)
    except KeyboardInterrupt:
        assert not reports or math.isinf(min(reports))
        return
    assert solution.status is Status.INTERRUPTED
    assert problem.fits(solution.choices)
    assert solution.cost == problem.evaluate(solution.choices) <= min(reports)
    assert 0.0 <= solution.gap < math.inf


@pytest.mark.parametrize("seed", range(4))
def test_interrupted_while_it_collects_what_its_threads_found_it_loses_nothing(
    everything_is_large: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Ctrl-C comes between the first thread's assignment and the second's."""
    step, collected = Budget.step, []

    def interrupted(budget: Budget, *count: int) -> None:
        if count and not collected:
            collected.append(count)
            raise KeyboardInterrupt
        step(budget, *count)

    monkeypatch.setattr(Budget, "step", interrupted)
    problem = ring(60)
    reports: list[float] = []
    solution = Ilp(seed=seed, step_limit=400, progress=lambda cost, bound: reports.append(cost)).solve(problem)
    assert collected and solution.status is Status.INTERRUPTED
    assert solution.cost == problem.evaluate(solution.choices) <= min(reports)


def test_where_nothing_it_meets_fits_the_least_memory_is_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One assignment fits, and no price of memory leads there from the others in one pass."""
    problem = replace(ring(30), memory_limit=None)
    least = replace(problem, node_costs=tuple(np.zeros(5) for _ in range(30)), edges=())
    choices = tuple(int(u.amounts.argmin()) for u in least.usages)
    problem = replace(problem, memory_limit=problem.peak_memory(choices))
    met: list[tuple[int, ...]] = []
    large = LargeSearch(
        problem,
        Budget(time.monotonic() + 60, 2),
        seed=0,
        found=met.append,
        bounded=lambda bound: None,
        improved=lambda cost: None,
        open=lambda: True,
    )
    large.run(lambda: choices)
    assert met
    assert problem.fits(met[-1])
    assert problem.evaluate(met[-1]) <= problem.evaluate(choices)
