"""Regression tests of pipeline steps: each gives the results of plain `jax.jit`, or an error that says why not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import autopar
from autopar.errors import BudgetError, ClusterError, ScheduleError

_DATA = np.random.default_rng(0)
X = _DATA.normal(size=(8, 5)).astype(np.float32)
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def _params(**shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape).astype(np.float32)) / 2 for name, shape in shapes.items()}


def _trained(forward: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, batch) ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    return step


def _check(step: Any, params: Any, batch: Any, **options: Any) -> Any:
    """Two steps in a row equal two of plain `jit`, in values, shapes and dtypes."""
    planned, plain = autopar.parallelize(step, cache=False, **options), jax.jit(step)
    mine, theirs = jax.tree.map(jnp.copy, params), params
    for _ in range(2):
        (mine, *more), (theirs, *expected) = planned(mine, batch), plain(theirs, batch)
        for one, other in zip(jax.tree.leaves((mine, more)), jax.tree.leaves((theirs, expected)), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    return planned.plans[-1]


@pytest.mark.contract
@pytest.mark.parametrize("options", [{"stages": 2, "num_microbatches": 1}, {"mesh": "8"}], ids=["stages", "mesh"])
def test_an_update_with_a_slice_of_the_same_rows(options: dict[str, Any]) -> None:
    def forward(p: Any, x: Any) -> Any:
        for scale in ("first", "second"):
            x = lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, 1, 3, 0) * p[scale], 2, 0)
        return x @ p["head"]

    _check(_trained(forward), _params(first=(5,), second=(5,), head=(5, 3)), X, **options)


def test_an_update_of_features_in_each_of_several_microbatches() -> None:
    def forward(p: Any, x: Any) -> Any:
        for scale in ("first", "second"):
            x = lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, 0, 3, 1) * p[scale], 1, 1)
        return x @ p["head"]

    _check(_trained(forward), _params(first=(3,), second=(3,), head=(5, 3)), X, stages=2, num_microbatches=2)


@pytest.mark.parametrize("schedule", ["inference"])
def test_a_schedule_without_backward_passes_is_refused(schedule: str) -> None:
    step = _trained(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"])
    planned = autopar.parallelize(step, stages=2, schedule=schedule, cache=False)
    with pytest.raises(ScheduleError, match=r"'inference' runs forward passes only, but `.*step` has a backward pass"):
        planned(_params(a=(5, 5), b=(5, 3)), X)


def test_constants_among_the_results_have_the_dtypes_of_jit() -> None:
    inner = _trained(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"])

    def step(params: Any, batch: Any) -> Any:
        params, loss = inner(params, batch)
        return params, (loss, 1.0, 2, jnp.arange(3))

    _check(step, _params(a=(5, 5), b=(5, 3)), X, stages=2)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_an_embedding_next_to_a_dense_input(num_microbatches: int) -> None:
    def forward(p: Any, batch: Any) -> Any:
        return jnp.tanh((batch["x"] + p["table"][batch["ids"]]) @ p["a"]) @ p["b"]

    params = _params(table=(11, 5), a=(5, 5), b=(5, 3))
    _check(_trained(forward), params, {"x": X, "ids": IDS}, stages=2, num_microbatches=num_microbatches)


def test_a_callback_that_reads_data_alone_runs_once_a_step() -> None:
    seen: list[Any] = []

    def forward(p: Any, x: Any) -> Any:
        io_callback(lambda rows: seen.append(np.asarray(rows)), None, x[:, 0])
        return jnp.tanh(x @ p["a"]) @ p["b"]

    step = _trained(forward)
    planned = autopar.parallelize(step, stages=2, num_microbatches=1, cache=False)
    jax.block_until_ready(planned(_params(a=(5, 5), b=(5, 3)), X))
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], X[:, 0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stages", "schedule"), [(3, "gpipe"), (4, "zb-h1")])
def test_one_example_in_each_microbatch(stages: int, schedule: str) -> None:
    def forward(p: Any, x: Any) -> Any:
        for name in ("a", "b", "c", "d"):
            x = x + jnp.tanh(x @ p[name])
        return x

    params = _params(a=(5, 5), b=(5, 5), c=(5, 5), d=(5, 5))
    plan = _check(_trained(forward), params, X, stages=stages, num_microbatches=8, schedule=schedule)
    assert len(plan.stages) == stages


def test_interleaved_makes_the_requested_number_of_stages() -> None:
    def forward(p: Any, x: Any) -> Any:
        for name in ("a", "b", "c", "d"):
            x = x + jnp.tanh(x @ p[name])
        return x

    params, step = _params(a=(5, 5), b=(5, 5), c=(5, 5), d=(5, 5)), _trained(forward)
    options = {
        "schedule": "interleaved",
        "num_microbatches": 4,
        "num_devices": 4,
        "hardware": "h100-sxm",
        "cache": False,
    }
    plan = autopar.plan(step, params, X, stages=4, **options)
    assert len(plan.stages) == 4
    text = " ".join(str(autopar.explain(plan)).split())
    assert "4 stages on 1 + 1 devices, 2 on each submesh, interleaved" in text
    assert "among equal submeshes, placed host after host" in text
    assert 'one program on all devices was not planned: `stages="auto"` plans both' in text
    with pytest.raises(BudgetError, match=r"cannot have 2 stages on 4 devices: choose a number that it has"):
        autopar.plan(step, params, X, stages=2, **options)


def test_more_stages_than_devices_are_refused() -> None:
    step = _trained(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"])
    with pytest.raises(ClusterError, match="3 stages were requested, and 1 device can have at most 1: choose 1 to 1"):
        autopar.plan(step, _params(a=(5, 5), b=(5, 3)), X, stages=3, num_devices=1, hardware="h100-sxm", cache=False)
