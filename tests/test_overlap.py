"""Plans by prices that include overlap: which are tried, and that the result fits and is faster by XLA's estimate."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import programs
import pytest
from on_absent_gpus import compiled

from autopar.hardware.profile import load
from autopar.ir.device_program import Reassociated
from autopar.planner import one_mesh
from autopar.planner import overlap_search as overlap
from autopar.planner.candidate import Candidate
from autopar.planner.memory_budget import MemoryBudget
from autopar.plans.plan import Plan
from autopar.plans.records import EarlyReduction
from autopar.transforms.program import Program, program_of
from autopar.verification.step_times import replayed
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.hlo_text import parse_module
from tests.planned import plan_and_candidate

H100 = load("h100-sxm")
MLP = programs.mlp(batch=32768, width=8192, num_layers=6, optimizer="adam")


@cache
def program() -> Program:
    return program_of(MLP.step, MLP.abstract_args(), carry=None, donate=None)


def planned(budget: float | None = None) -> tuple[Plan, Candidate]:
    """On two hosts of eight."""
    return plan_and_candidate(
        program().as_traced.in_microbatches(1), mesh="2x8", hardware=H100, memory_budget_bytes=budget
    )


@cache
def dear() -> tuple[Plan, Candidate]:
    return planned()


@cache
def level() -> tuple[Plan, Candidate]:
    """As if nothing overlapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_mesh, "search_overlap_prices", lambda *_, **__: [])
        return planned()


@pytest.mark.slow
def test_prices_are_what_is_exposed() -> None:
    begun = level()[1]
    tried = list[overlap.Prices]()

    def other(prices: overlap.Prices, to_beat: float) -> Candidate | None:
        assert to_beat <= begun.step_time_s
        tried.append(prices)
        return begun if len(tried) == 1 else None

    def exposing(**exposed_s: float) -> Candidate:
        exposed = {kind.replace("_", "-"): seconds for kind, seconds in exposed_s.items()}
        return replace(begun, parts=replace(begun.parts, prediction=replace(begun.parts.prediction, exposed_s=exposed)))

    assert overlap._exposed_shares(exposing()) == {"gather": 0.2, "sum": 0.2}
    assert overlap._exposed_shares(exposing(reduce_scatter=1e3)) == {"gather": 0.2, "sum": 1.0}
    assert overlap._exposed_shares(exposing(all_to_all=1e3)) == {"gather": 0.2, "sum": 0.2}
    found = overlap.search_overlap_prices(begun, other, begun.step_time_s, only_one=False)
    assert found == [begun], "it is no faster, so the search ends"
    assert tried == [overlap._exposed_shares(begun), {"gather": 0.6, "sum": 0.4}]
    faster = 0.99 * begun.step_time_s
    assert overlap.search_overlap_prices(begun, other, faster, only_one=False) == []
    assert len(tried) == 2, "another mesh is faster"
    assert overlap.search_overlap_prices(begun, other, faster, only_one=False, even_slower=True) == []
    assert tried[2:] == tried[:1], "once, by what is exposed"


def test_a_mesh_is_searched_if_it_is_near_or_the_solver_prefers_it() -> None:
    first = one_mesh.Rank(score_s=10e-3, cost_s=9e-3)
    assert first.may_beat(first) and not first.is_cheaper(first)
    assert one_mesh.Rank(score_s=10.9e-3, cost_s=12e-3).may_beat(first)
    assert not one_mesh.Rank(score_s=11.1e-3, cost_s=8.5e-3).may_beat(first)
    assert one_mesh.Rank(score_s=20e-3, cost_s=8e-3).may_beat(first)
    without_overlap = one_mesh.Rank(score_s=10e-3, cost_s=math.inf)
    assert not one_mesh.Rank(score_s=20e-3, cost_s=8e-3).may_beat(without_overlap)


@pytest.mark.slow
def test_it_goes_on_from_a_faster_plan_and_tries_no_price_twice() -> None:
    begun, better = level()[1], dear()[1]
    assert better.step_time_s < begun.step_time_s
    tried = list[overlap.Prices]()

    def other(prices: overlap.Prices, _: float) -> Candidate | None:
        tried.append(prices)
        return better if len(tried) == 1 else None

    assert overlap.search_overlap_prices(begun, other, math.inf, only_one=False) == [better]
    assert 1 <= len(tried) <= 2 and all(one != tried[0] for one in tried[1:])
    tried.clear()
    assert overlap.search_overlap_prices(begun, other, math.inf, only_one=True) == [better]
    assert len(tried) == 1


@pytest.mark.slow
def test_it_is_faster_and_by_the_replay_no_slower(absent_gpus: Compiler) -> None:
    def seconds(plan: Plan) -> float:
        made = compiled(absent_gpus, plan, program(), *MLP.abstract_args())
        replay, _ = replayed(parse_module(made.hlo_text), H100.rates_name, H100.devices_per_host)
        assert replay is not None
        return replay.step_time_s

    assert dear()[1].step_time_s < level()[1].step_time_s
    assert seconds(dear()[0]) < 1.005 * seconds(level()[0])


def test_only_what_something_else_waits_for_stays_apart() -> None:
    awaited = [EarlyReduction(node=9, operand=0, values=(3, 5))]

    def separate(*sums: tuple[int, ...]) -> bool:
        return overlap._stay_separate([Reassociated("all-reduce", ("data",), values, 0.0) for values in sums], awaited)

    assert separate((3, 4))
    assert separate((3, 4), (5, 3, 4))
    assert not separate((3, 4), (3, 4, 6))


@pytest.mark.slow
def test_where_it_does_not_fit_another_is_taken() -> None:
    limit = 0.95 * max(dear()[1].peak_bytes, level()[1].peak_bytes)
    budget = MemoryBudget.with_room_for(limit).total_bytes
    assert planned(budget)[1].peak_bytes <= limit
