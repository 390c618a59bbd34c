"""Frozen parameters: LoRA's base weights have no gradient and no optimizer state, however they are frozen."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import front_ends
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.comparison.least_devices import state_of
from autopar.plans.plan import Plan
from autopar.transforms.program import program_of
from benchmarks.zoo.lora import Freezing, LoraConfig, lora

TINY = LoraConfig(layers=3, dtype=jnp.dtype(jnp.float32))
FREEZINGS: tuple[Freezing, ...] = ("own field", "zero updates")


def planned(freezing: Freezing, config: LoraConfig = TINY, **options: object) -> Plan:
    step, args = lora(config, 16, 32, freezing).target
    return autopar.plan(step, *args, hardware="h100-sxm", **{"mesh": "8", **options})


def frozen_paths(plan: Plan) -> set[str]:
    return {t.path for t in plan.inputs if t.role == "parameter" and "lora_" not in t.path}


@pytest.mark.parametrize("freezing", FREEZINGS)
def test_frozen_weights_have_no_gradient(freezing: Freezing) -> None:
    plan = planned(freezing)
    assert len(frozen_paths(plan)) == 12
    assert "12 of 26 parameters" in "\n".join(plan.notes) and "frozen" in "\n".join(plan.notes)
    moments = [t for t in plan.inputs if t.role == "optimizer" and t.shape]
    assert len(moments) == 2 * 14 and all("lora_" in t.path for t in moments)
    largest = max(math.prod(t.shape) for t in moments)
    for one in plan.collectives:  # nothing the size of a frozen weight is reduced in the update
        assert "gradient" not in one.cause or one.num_bytes <= 4 * largest, one


def test_both_ways_to_freeze_give_one_plan() -> None:
    own, zero = (planned(freezing, replace(TINY, width=512, hidden=1024)) for freezing in FREEZINGS)
    assert zero.prediction.step_time_s == pytest.approx(own.prediction.step_time_s, rel=0.02)
    assert zero.prediction.peak_bytes == pytest.approx(own.prediction.peak_bytes, rel=0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("freezing", FREEZINGS)
def test_lora_trains_as_unsharded(freezing: Freezing) -> None:
    training = lora(TINY, 16, 32, freezing)
    state = jax.jit(training.create_state)(jax.random.key(0))
    step = autopar.parallelize(mesh="8", hardware="h100-sxm", pin={"*/layers/*/kernel": P(None, "data")})(training.step)
    plain, sharded = state, state
    for seed in range(2):
        batch = training.make_batch(seed)
        plain, expected = jax.jit(training.step)(plain, batch)
        sharded, loss = step(sharded, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for before, one, other in zip(*map(jax.tree.leaves, (state, plain, sharded)), strict=True):
        moved = np.abs(np.asarray(one, float) - np.asarray(before, float)).max(initial=0.0)
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-2 * moved)


def test_weights_that_are_cast_before_the_gradient_are_parameters() -> None:
    def step(params: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        half = params.astype(jnp.bfloat16)
        loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).astype(jnp.float32).sum())(half)
        return params - 0.1 * grad.astype(jnp.float32), loss

    args = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    plan = autopar.plan(step, *args, mesh="8", hardware="h100-sxm")
    assert [t.role for t in plan.inputs] == ["parameter", "data"]


def test_base_weights_in_an_argument_of_their_own_are_parameters() -> None:
    case = front_ends.OPTAX["lora"]()
    args = jax.eval_shape(case.create)
    plan = autopar.plan(case.step, *args, front_ends.make_batch(0), mesh="8", hardware="h100-sxm")
    roles = {t.path: t.role for t in plan.inputs}
    assert {role for path, role in roles.items() if path.startswith(("base", "adapters"))} == {"parameter"}
    assert {role for path, role in roles.items() if path.startswith("batch")} == {"data"}
    assert "6 of 12 parameters" in "\n".join(plan.notes)


@pytest.mark.slow
def test_lora_of_70_billion_parameters_fits_eight_h100s() -> None:
    step, args = lora(LoraConfig.llama_70b(), 8, 2048).target
    start = time.perf_counter()
    plan = autopar.plan(step, *args, num_devices=8, hardware="h100-sxm")
    assert time.perf_counter() - start < 60
    assert plan.num_devices == 8 and plan.prediction.peak_bytes < 64e9


def test_the_training_state_counts_no_gradients_of_frozen_weights() -> None:
    step, args = lora(TINY, 16, 32).target
    state = state_of(program_of(step, args, carry=None, donate=None))
    adapters = sum(leaf.size * 4 for leaf in jax.tree.leaves(args[0].params))
    assert state.gradient_bytes == adapters < state.parameter_bytes
