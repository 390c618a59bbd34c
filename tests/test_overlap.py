"""Plans by prices that count on overlap: which are tried, that what is found is faster by XLA's own compiler, and fits."""

from __future__ import annotations

from functools import cache

import programs
import pytest

from autopar import overlap, planner
from autopar.compiler import Compiler
from autopar.compiler_options import compiler_options
from autopar.cost.hardware import load
from autopar.execute import abstract_mesh, jit_plan, lower_for
from autopar.jax_compat import module_bytes
from autopar.plan import Plan
from autopar.program import Program, program_of
from autopar.within_budget import Made

H100 = load("h100-sxm")
MLP = programs.mlp(batch=65536, width=4096, num_layers=6, optimizer="adam")


@cache
def program() -> Program:
    return program_of(MLP.step, MLP.abstract_args(), carry=None, donate=None)


def planned(budget: float | None = None) -> tuple[Plan, Made]:
    """On two hosts of eight."""
    return planner.plan_and_parts(
        program().as_traced.in_microbatches(1), mesh="2x8", hardware=H100, memory_budget_bytes=budget
    )


@cache
def dear() -> tuple[Plan, Made]:
    return planned()


@cache
def level() -> tuple[Plan, Made]:
    """By one price of all that need not be waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_DEARER", {"gather": (), "sum": ()})
        return planned()


def test_what_is_exposed_is_made_dearer() -> None:
    begun = level()[1]
    told = begun.parts.prediction.xla_exposed_s or {}
    assert told["all-gather"] > told["reduce-scatter"] + told["all-reduce"]
    asked = []

    def other(prices: overlap.Prices, to_beat: float) -> Made | None:
        assert to_beat <= begun.compared_s
        asked.append((prices["gather"], prices["sum"]))
        return None

    overlap.counting_on_overlap(begun, other, begun.compared_s, at_once=False)
    level_price, *dearer = [gather / total for gather, total in asked]
    assert level_price == 1
    assert 1 < dearer[0] < dearer[1]
    overlap.counting_on_overlap(begun, other, begun.compared_s, at_once=True)
    assert len(asked) == 4
    overlap.counting_on_overlap(begun, other, 0.7 * begun.compared_s, at_once=False)
    assert len(asked) == 4, "nothing would make it so much faster"


def test_it_is_faster_by_xla_too(absent_gpus: Compiler) -> None:
    def seconds(plan: Plan) -> float:
        jitted = jit_plan(plan, program().of(plan).trace, abstract_mesh(plan.mesh))
        module = module_bytes(lower_for("cuda", jitted, MLP.abstract_args()))
        compiled = absent_gpus.compile(module, H100, 16, 2, options=compiler_options(plan))
        assert compiled.step_time_s
        return compiled.step_time_s

    assert dear()[1].compared_s < 0.98 * level()[1].compared_s
    assert seconds(dear()[0]) < 0.98 * seconds(level()[0])


def test_where_it_does_not_fit_another_is_taken() -> None:
    peaks = [made.peak_bytes for _, made in (level(), dear())]
    assert peaks[0] < peaks[1]
    budget = 0.5 * sum(peaks) / (1 - planner.BUDGET_MARGIN)
    assert planned(budget)[1].peak_bytes <= 0.5 * sum(peaks)
