"""A loop of the backward pass is split into the part that other stages wait for and the rest, with unchanged results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pipelines import assert_alike
from test_pipeline_loops import ADAM, BATCH, SGD, WIDTH, layer, state_of, step_of

import autopar
from autopar.pipeline.cut.split_loops import with_split_loops
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.plan import PipelinePlan
from autopar.rules.table import traits_of
from autopar.transforms.program import program_of

Loss = Callable[[Any, Any], jax.Array]


def batch_of(seed: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(100 + seed), 2)
    return jax.random.normal(keys[0], (BATCH, WIDTH)), jax.random.normal(keys[1], (BATCH, WIDTH))


def loss_with(body: Callable[..., Any], over: Callable[[Any], Any] = lambda layers: layers, **how: Any) -> Loss:
    """A loss whose layers are a scan of this body; what it stacks is added."""

    def loss(params: Any, batch: Any) -> jax.Array:
        h, extra = lax.scan(body, batch[0] @ params["first"], over(params["layers"]), **how)
        more = 0.0 if extra is None else jnp.mean(extra)
        return jnp.mean((h @ params["last"] - batch[1]) ** 2) + 0.1 * more

    return loss


def sharing(params: Any, batch: Any) -> jax.Array:
    """The layers share a weight, and all read one value, as decoder layers read the encoder's output."""

    def body(h: Any, one: Any) -> Any:
        return h + jnp.tanh(h @ one["kernel"] + shared @ params["last"]), None

    shared = jnp.tanh(batch[0] @ params["last"])
    h, _ = lax.scan(body, batch[0] @ params["first"], params["layers"])
    return jnp.mean((h - batch[1]) ** 2)


def _stacking(h: Any, one: Any) -> Any:
    h, _ = layer(h, one)
    return h, jnp.mean(h**2, -1)


def _nested(h: Any, one: Any) -> Any:
    return lax.scan(lambda x, _: layer(x, one), h, None, length=2)[0], None


def _branching(h: Any, one: Any) -> Any:
    return lax.cond(one["bias"][0] > 0, lambda x: x, lambda x: layer(x, one)[0], h), None


def _dropping(h: Any, given: Any) -> Any:
    one, key = given
    kept = jax.random.bernoulli(key, 0.5, h.shape)
    return h + jnp.where(kept, jnp.tanh(h @ one["kernel"]), 0.0), None


def _with_keys(layers: Any) -> Any:
    return layers, jax.random.split(jax.random.key(5), len(layers["kernel"]))


LOSSES: dict[str, Loss] = {
    "plain": loss_with(layer),
    "recomputed": loss_with(jax.checkpoint(layer)),
    "last to first": loss_with(layer, reverse=True),
    "unrolled by two": loss_with(layer, unroll=2),
    "with stacked outputs": loss_with(_stacking),
    "nested": loss_with(_nested),
    "with a branch": loss_with(_branching),
    "with dropout": loss_with(_dropping, _with_keys),
    "sharing a weight and a value": sharing,
}


def contractions(trace: Any) -> list[list[int]]:
    """The matmuls in each loop of the backward pass."""
    found: list[list[int]] = []
    for region in trace.regions:
        if region.kind == "scan" and trace.equations[region.enter[0]].phase == "backward":
            (span,) = region.sections
            found.append([n for n in range(*span) if traits_of(trace.equations[n].primitive).contraction])
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOSSES)
def test_the_results_are_those_of_the_step(name: str) -> None:
    step = step_of(SGD, LOSSES[name])
    program = program_of(step, (state_of(SGD), batch_of(0)), carry=None, donate=None)
    trace = program.as_traced.trace
    split = with_split_loops(trace)
    if name not in ("nested", "with a branch"):  # what is in an inner loop stays there
        (before,) = contractions(trace)
        parts = contractions(split)
        assert len(parts) == 2 and all(parts) and sum(map(len, parts)) == len(before), "no matmul runs twice"
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": "zb-h1", "splits_loops": True}
    assert_alike(step, state_of(SGD), batch_of, **options)


def test_a_step_without_such_loops_is_left_alone() -> None:
    forward = program_of(LOSSES["plain"], (state_of(SGD)[0], batch_of(0)), carry=None, donate=None)
    assert with_split_loops(forward.as_traced.trace) is forward.as_traced.trace
    short = program_of(step_of(SGD), (state_of(SGD, layers=1), batch_of(0)), carry=None, donate=None)
    assert with_split_loops(short.as_traced.trace) is short.as_traced.trace


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "num_stages"), [("zb-h1", 3), ("zb-v", 4)])
def test_it_is_planned_saved_and_run(schedule: str, num_stages: int, tmp_path: Any) -> None:
    step, state = step_of(ADAM), state_of(ADAM)
    run = autopar.parallelize(step, stages=num_stages, num_microbatches=4, schedule=schedule, hardware="cpu-host")
    found, loss = run(state, batch_of(0))
    plan = run.plans[-1]
    assert isinstance(plan, PipelinePlan) and plan.splits_loops
    weights = [stage.cost.weight_s for stage in plan.stages]
    assert all(weights), "every stage has work that no other stage waits for"
    plan.save(tmp_path / "p.plan.json")
    loaded = autopar.load_plan(tmp_path / "p.plan.json")
    again, other = autopar.parallelize(step, plan=loaded)(state, batch_of(0))
    expected, expected_loss = jax.jit(step)(state, batch_of(0))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert float(other) == pytest.approx(float(loss), rel=1e-6)
    for one, two, three in zip(*map(jax.tree.leaves, (found, again, expected)), strict=True):
        np.testing.assert_allclose(np.asarray(one), three, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(two), three, rtol=1e-5, atol=1e-5)


def test_schedules_with_whole_backward_passes_keep_the_loops() -> None:
    step, state = step_of(SGD), state_of(SGD)
    options = {"stages": 2, "num_microbatches": 4, "num_devices": 2, "hardware": "h100-sxm"}
    plain = autopar.plan(step, state, batch_of(0), schedule="1f1b", **options)
    assert not plain.splits_loops and "splits_loops" not in plain.to_json()
    either = autopar.plan(step, state, batch_of(0), **options)
    assert {one.schedule for one in either.tried} >= {"1f1b", "zb-h1", "zb-v"}
    assert Cuttable.of(program_of(step, (state, batch_of(0)), carry=None, donate=None), splits_loops=True).stacks
