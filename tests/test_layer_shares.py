"""Prices of runs of units from one plan of all units, and stages whose borders lie between any two equations."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.hardware.profile import load
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.search.plan_stages import plan_stages, searches_of
from autopar.pipeline.search.request import StageRequest
from autopar.pipeline.search.stage_costs import STASH_PRICES, StageCosts
from autopar.transforms.program import Program, program_of

H100 = load("h100-sxm")
MICROBATCHES = 4
#: Widths of layers of which no two are equal.
WIDTHS = (256, 1024, 384, 2048, 512, 1536, 640, 256)


def step(params: list[jax.Array], x: jax.Array) -> Any:
    """Layers of unlike size with a skip connection from the second to the last."""

    def loss_of(params: list[jax.Array]) -> jax.Array:
        h, kept = x, x
        for n, w in enumerate(params):
            h = jax.nn.gelu(h @ w)
            kept = h.mean(axis=1, keepdims=True) if n == 1 else kept
        return jnp.square(h + kept.sum(axis=1, keepdims=True)).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


ARGS = (
    [jax.ShapeDtypeStruct((a, b), jnp.float32) for a, b in pairwise(WIDTHS)],
    jax.ShapeDtypeStruct((8192, WIDTHS[0]), jnp.float32),
)


@cache
def program() -> Program:
    return program_of(step, ARGS, carry=None, donate=None)


def request(num_devices: int, **options: Any) -> StageRequest:
    cluster = Cluster((DeviceGroup(H100.name, 1, num_devices),))
    return StageRequest(cluster=cluster, profiles={H100.name: H100}, num_microbatches=MICROBATCHES, **options)


@cache
def costs() -> tuple[StageCosts, int]:
    """The costs of runs of units, and the number of units."""
    searches = searches_of(Cuttable.of(program()), request(4, stages=2))
    assert searches.units is not None
    searches.search(MICROBATCHES)
    return searches.costs[MICROBATCHES], len(searches.units.seconds)


@pytest.mark.parametrize("option", range(len(STASH_PRICES)))
def test_times_and_state_of_runs_add_up(option: int) -> None:
    """But for what a cut through a kernel adds: for each pass, the values it kept to itself, written and read."""
    of, count = costs()
    shape = SubmeshShape(H100.name, 1, 2, option=option)
    whole = of.cost(0, count - 1, shape)
    added_s = []
    for border in range(1, count):
        parts = [of.cost(0, border - 1, shape), of.cost(border, count - 1, shape)]
        for name in ("update_s", "state_bytes"):
            assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name)), name
        forward = sum(part.forward_s for part in parts) - whole.forward_s
        passes = sum(part.backward_s + part.weight_s for part in parts) - whole.backward_s - whole.weight_s
        assert forward == pytest.approx(passes, abs=1e-12)
        added_s.append(forward)
        held = sum(part.flight_bytes for part in parts)
        assert held >= whole.flight_bytes * (1 - 1e-9), "a residual that two stages read is held by both"
    assert min(added_s) >= -1e-12
    assert min(added_s) < 1e-9 < 1e-6 < max(added_s)


def test_what_is_dearer_to_hold_is_computed_again() -> None:
    of, count = costs()
    found = [of.cost(0, count - 1, SubmeshShape(H100.name, 1, 1, option=n)) for n in range(len(STASH_PRICES))]
    held, seconds = [one.flight_bytes for one in found], [one.backward_s + one.weight_s for one in found]
    assert held == sorted(held, reverse=True)
    assert held[0] > 1.1 * held[-1]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_price_is_that_of_the_stage_when_it_is_planned(num_stages: int) -> None:
    """Kernels of both passes that XLA would fuse in one program make up to a quarter of these small stages' times."""
    plan = plan_stages(program(), request(num_stages, stages=num_stages, schedule="1f1b"))
    of, count = costs()
    starts = [plan.starts[stage.first_layer] for stage in plan.stages]
    for stage, first, end in zip(plan.stages, starts, [*starts[1:], count], strict=True):
        priced = of.cost(first, end - 1, stage.submesh.shape)
        for name in ("forward_s", "state_bytes"):
            assert getattr(priced, name) == pytest.approx(getattr(stage.cost, name), rel=0.3), name
        passes = stage.cost.backward_s + stage.cost.weight_s
        assert priced.backward_s + priced.weight_s == pytest.approx(passes, rel=0.3)


def test_stages_are_as_equal_as_any_cut_allows() -> None:
    """By the prices of units, the slowest of two stages is within 5 % of the best of all borders."""
    plan = plan_stages(program(), request(2, stages=2, schedule="1f1b"))
    of, count = costs()
    shape = SubmeshShape(H100.name, 1, 1)

    def seconds(first: int, last: int) -> float:
        one = of.cost(first, last, shape)
        return (MICROBATCHES - 1) * (one.forward_s + one.backward_s + one.weight_s) + one.update_s

    best = min(max(seconds(0, n - 1), seconds(n, count - 1)) for n in range(1, count))
    border = plan.starts[plan.stages[1].first_layer]
    assert max(seconds(0, border - 1), seconds(border, count - 1)) <= 1.05 * best


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_a_few_operations_have_as_many_stages_as_asked_for(num_stages: int) -> None:
    """One operation takes almost all the time, and the others none to speak of."""

    def lopsided(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            h = jnp.tanh(x @ w)
            for _ in range(8):
                h = jnp.sin(h[:, :64]) + 0.5
            return h.mean()

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(64, 512)).astype(np.float32), rng.normal(size=(64, 64)).astype(np.float32)
    run = autopar.parallelize(lopsided, stages=num_stages, num_microbatches=2, schedule="1f1b", cache=False)
    after, loss = run(w, x)
    wanted, wanted_loss = jax.jit(lopsided)(w, x)
    plan = run.plan(w, x)
    assert isinstance(plan, PipelinePlan)
    assert len(plan.stages) == num_stages
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(after, wanted, rtol=1e-5, atol=1e-6)
