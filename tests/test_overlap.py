"""Plans by prices that include overlap: which are tried, and that the result fits and is faster by XLA's estimate."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import programs
import pytest
from jax.sharding import PartitionSpec
from on_absent_gpus import all_reduced, compiled

from autopar.hardware.profile import load
from autopar.ir.device_program import Reassociated
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
NUM_LAYERS = 12
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
    """By one price of all that need not be waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_HIGHER_PRICES", {"gather": (), "sum": ()})
        return planned()


@pytest.mark.slow
def test_what_is_exposed_is_made_dearer() -> None:
    begun = level()[1]
    told = begun.parts.prediction.xla_exposed_s or {}
    assert told["all-gather"] > told["reduce-scatter"] + told.get("all-reduce", 0.0)
    asked = []

    def other(prices: overlap.Prices, to_beat: float) -> Candidate | None:
        assert to_beat <= begun.step_time_s
        asked.append((prices["gather"], prices["sum"]))
        return None

    overlap.search_overlap_prices(begun, other, begun.step_time_s, only_one=False)
    level_price, *dearer = [gather / total for gather, total in asked]
    assert level_price == 1
    assert 1 < dearer[0] < dearer[1]
    overlap.search_overlap_prices(begun, other, begun.step_time_s, only_one=True)
    assert len(asked) == 4
    overlap.search_overlap_prices(begun, other, 0.7 * begun.step_time_s, only_one=False)
    assert len(asked) == 4, "nothing would make it so much faster"


@pytest.mark.slow
def test_it_is_faster_and_by_the_replay_no_slower(absent_gpus: Compiler) -> None:
    def seconds(plan: Plan) -> float:
        made = compiled(absent_gpus, plan, program(), *MLP.abstract_args())
        replay, _ = replayed(parse_module(made.hlo_text), H100.rates_name, H100.devices_per_host)
        assert replay is not None
        return replay.step_time_s

    assert dear()[1].step_time_s < level()[1].step_time_s
    assert seconds(dear()[0]) < 1.005 * seconds(level()[0])


@pytest.mark.slow
def test_sums_that_xla_would_join_are_kept_apart_where_that_is_faster(absent_gpus: Compiler) -> None:
    """A table that both ends of a network read: the sum of what the last layer makes of it has the whole backward pass to hide
    behind, but not where it is taken together with the first's."""

    def loss(state: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        h = state["table"].astype(jnp.bfloat16)[tokens]
        for n in range(NUM_LAYERS):
            h = jnp.tanh(h @ state[f"w{n}"].astype(jnp.bfloat16))
        scores = h @ state["table"].astype(jnp.bfloat16).T
        return jnp.square(scores.astype(jnp.float32)).mean()

    def step(state: dict[str, jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state, tokens))

    width, vocab = 1048, 32744
    weights = {f"w{n}": jax.ShapeDtypeStruct((width, width), jnp.float32) for n in range(NUM_LAYERS)}
    state = weights | {"table": jax.ShapeDtypeStruct((vocab, width), jnp.float32)}
    args = state, jax.ShapeDtypeStruct((131072,), jnp.int32)
    pins = {f"state/{name}": PartitionSpec() for name in state} | {"tokens": PartitionSpec("data")}
    traced = program_of(step, args, carry=None, donate=None)
    plan, made = plan_and_candidate(traced.as_traced.in_microbatches(1), mesh="16", hardware=H100, pin=pins)
    assert plan.early_reductions
    assert not made.parts.device.reassociated
    apart = compiled(absent_gpus, plan, traced, *args)
    together = compiled(absent_gpus, replace(plan, early_reductions=()), traced, *args)
    layers, table = NUM_LAYERS * width**2, vocab * width
    assert all_reduced(apart.hlo_text) == {"bf16": layers + 2 * table}
    assert all_reduced(together.hlo_text) == {"bf16": layers, "f32": table}
    assert apart.step_time_s < together.step_time_s


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
