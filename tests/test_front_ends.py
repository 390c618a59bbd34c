"""Every front end trains as it does without autopar: three steps on eight devices equal the unsharded steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import front_ends
import jax
import numpy as np
import pytest
from same_steps import splits

import autopar

NUM_STEPS = 3
#: Of values and of what they moved by, for float32.
TOLERANCE = 2e-4
#: Libraries that a front end needs beside autopar's own.
NEEDS = {"equinox": "equinox", "haiku": "haiku"}
#: What is run on the oldest JAX too, beside all front ends.
IMPORTANT = ("chain_clip_schedule", "adafactor", "muon", "multi_steps", "multi_transform", "lora", "ema_of_params")


def trained(case: front_ends.Case, step: Callable[..., Any]) -> tuple[list[float], list[np.ndarray]]:
    """Losses of some steps, and what the state is then."""
    state, losses = case.create(), []
    for seed in range(NUM_STEPS):
        result = step(*state, front_ends.make_batch(seed))
        state = case.following(state, result)
        losses.append(float(case.loss(result)))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(case.values(state))]


def check(case: front_ends.Case) -> None:
    initial = [np.asarray(leaf) for leaf in jax.tree.leaves(case.values(case.create()))]
    plain_losses, plain = trained(case, case.jit(case.step))
    step = autopar.parallelize(**({"mesh": "8", "hardware": "cpu-host"} | (case.options or {})))(case.step)
    losses, sharded = trained(case, step)
    assert splits(step.latest_plan)
    np.testing.assert_allclose(losses, plain_losses, rtol=TOLERANCE)
    assert any(not np.array_equal(before, after) for before, after in zip(initial, plain, strict=True)), "it trains"
    for before, expected, found in zip(initial, plain, sharded, strict=True):
        moved = np.abs(expected.astype(float) - before).max() if expected.size else 0.0
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * max(moved, 1e-3))


@pytest.mark.sampled(3)
@pytest.mark.contract
@pytest.mark.parametrize("name", front_ends.FRONT_ENDS)
def test_a_front_end_trains_as_unsharded(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not here: it does not support JAX {jax.__version__}")
    check(front_ends.FRONT_ENDS[name]())


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.contract if n in IMPORTANT else ()) for n in front_ends.OPTAX]
)
def test_an_optimizer_trains_as_unsharded(name: str) -> None:
    check(front_ends.OPTAX[name]())
