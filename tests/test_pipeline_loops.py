"""A model whose layers are one loop is cut between its trips, and computes what it computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from pipelines import pipelined

from autopar.pipeline.run import Pipeline

WIDTH, LAYERS, BATCH = 16, 6, 8
SGD = optax.sgd(0.1)
#: Rounding is divided by no less than `eps`.
ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-3))


def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ one["kernel"] + one["bias"]), None


def loss_of(params: Any, batch: Any) -> jax.Array:
    h = batch[0] @ params["first"]
    h, _ = lax.scan(layer, h, params["layers"])
    return jnp.mean((h @ params["last"] - batch[1]) ** 2)


def step_of(optimizer: optax.GradientTransformation, loss: Any = loss_of) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def state_of(optimizer: optax.GradientTransformation, layers: int = LAYERS) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "first": 0.3 * jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "layers": {
            "kernel": 0.3 * jax.random.normal(keys[1], (layers, WIDTH, WIDTH)),
            "bias": jnp.zeros((layers, WIDTH)),
        },
        "last": 0.3 * jax.random.normal(keys[2], (WIDTH, WIDTH)),
    }
    return params, optimizer.init(params)


def batch_of(seed: int) -> Any:
    one, other = jax.random.split(jax.random.key(seed))
    return jax.random.normal(one, (BATCH, WIDTH)), jax.random.normal(other, (BATCH, WIDTH))


def check(step: Any, state: Any, steps: int = 2, **options: Any) -> Pipeline:
    """The pipeline, once it has given the unsharded step's numbers."""
    run, pipeline = pipelined(step, (state, batch_of(0)), **options)
    plain = jax.jit(step)
    here = there = state
    for seed in range(steps):
        here, loss = run(here, batch_of(seed))
        there, expected = plain(there, batch_of(seed))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert jax.tree.structure(here) == jax.tree.structure(there)
        for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(np.asarray(one), other, rtol=1e-5, atol=1e-6)
    return pipeline


def crossing(pipeline: Pipeline, kind: str) -> list[tuple[int, ...]]:
    """Shapes of what stages get from others."""
    return [
        struct.shape
        for stage in pipeline.stages
        for port, struct in zip(
            stage.program.inputs, jax.tree.leaves(stage.program.program.trace.arguments), strict=True
        )
        if port.kind == kind
    ]


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_loop_over_layers_is_cut(optimizer: optax.GradientTransformation, num_stages: int) -> None:
    pipeline = check(step_of(optimizer), state_of(optimizer), num_stages=num_stages, num_microbatches=2)
    activations = crossing(pipeline, "inside")
    assert activations == [(BATCH // 2, WIDTH)] * (2 * (num_stages - 1))
    assert all(shape == () for shape in crossing(pipeline, "outside"))  # the norm's terms


def test_parts_need_not_be_equal() -> None:
    """Seven layers on two stages: between steps, a stacked leaf is in parts that are read as one."""
    pipeline = check(step_of(SGD), state_of(SGD, layers=7), num_stages=2, num_microbatches=2)
    assert crossing(pipeline, "inside") == [(BATCH // 2, WIDTH)] * 2


def test_a_leaf_in_equal_parts_is_an_array_over_all_stages() -> None:
    step, state = step_of(SGD), state_of(SGD)
    run, _ = pipelined(step, (state, batch_of(0)), num_stages=2, num_microbatches=2)
    (params, _), _ = run(state, batch_of(0))
    kernel = params["layers"]["kernel"]
    assert isinstance(kernel, jax.Array)
    assert len(kernel.sharding.device_set) == len(jax.devices())
    rows = {shard.index[0].indices(LAYERS)[:2] for shard in kernel.addressable_shards}
    assert {stop - start for start, stop in rows} == {LAYERS // 2}
