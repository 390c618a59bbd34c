"""A model whose layers are one loop is cut between iterations, with unchanged results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pipelines import assert_alike, crossing, pipelined

from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.stacked_leaves import as_arrays, assembled, part_of

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


def check(step: Any, state: Any, **options: Any) -> Pipeline:
    return assert_alike(step, state, batch_of, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("optimizer", "num_stages"), [(SGD, 2), (ADAM, 4)], ids=["sgd-2", "adam-4"])
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


def shared_weight(params: Any, batch: Any) -> jax.Array:
    """Each trip reads a weight that all share: each stage adds up a gradient of it."""

    def block(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(layer(h, one)[0] @ params["first"]), None

    h, _ = lax.scan(block, batch[0], params["layers"])
    return jnp.mean((h @ params["last"] - batch[1]) ** 2)


@pytest.mark.slow
def test_a_weight_that_all_trips_share() -> None:
    """Its gradient passes once a step, however many microbatches there are."""
    pipeline = check(step_of(ADAM, shared_weight), state_of(ADAM), num_stages=2, num_microbatches=2)
    assert crossing(pipeline, "inside") == [(BATCH // 2, WIDTH)] * 2
    assert [shape for shape in crossing(pipeline, "outside") if shape] == [(WIDTH, WIDTH)]


def random_and_recomputed(params: Any, batch: Any) -> jax.Array:
    """Keys are carried from layer to layer, or stacked; a layer is computed again; each adds a term to the loss."""

    def block(carry: Any, one: Any) -> Any:
        h, key = carry
        weights, stacked = one
        key, own = jax.random.split(key)
        kept = jax.random.bernoulli(own, 0.8, h.shape) & jax.random.bernoulli(stacked, 0.8, h.shape)
        h = h + jnp.where(kept, jnp.tanh(h @ weights["kernel"] + weights["bias"]), 0.0)
        return (h, key), jnp.mean(h**2)

    keys = jax.random.split(jax.random.key(4), LAYERS)
    start = (batch[0] @ params["first"], jax.random.PRNGKey(3))
    (h, _), sizes = lax.scan(jax.checkpoint(block), start, (params["layers"], keys))
    return jnp.mean((h @ params["last"] - batch[1]) ** 2) + 0.1 * jnp.sum(sizes)


@pytest.mark.slow
def test_layers_with_dropout_that_are_computed_again() -> None:
    pipeline = check(step_of(ADAM, random_and_recomputed), state_of(ADAM), num_stages=2, num_microbatches=2)
    assert sorted(crossing(pipeline, "inside")) == [(2,), (BATCH // 2, WIDTH), (BATCH // 2, WIDTH)]


def two_loops(params: Any, batch: Any) -> jax.Array:
    """An encoder, and a decoder each of whose layers reads what it made; layers of one are stacked along another dim."""

    def decode(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ one + encoded), None

    encoded, _ = lax.scan(layer, batch[0] @ params["first"], params["layers"])
    h, _ = lax.scan(decode, batch[1], jnp.moveaxis(params["decoder"], 1, 0))
    return jnp.mean((h @ params["last"] - batch[1]) ** 2)


@pytest.mark.slow
def test_two_loops_of_as_many_trips() -> None:
    params, _ = state_of(ADAM)
    params["decoder"] = 0.2 * jax.random.normal(jax.random.key(9), (WIDTH, LAYERS, WIDTH))
    state = params, ADAM.init(params)
    pipeline = check(step_of(ADAM, two_loops), state, num_stages=4, num_microbatches=2)
    assert set(crossing(pipeline, "inside")) == {(BATCH // 2, WIDTH)}
    assert all(shape == () for shape in crossing(pipeline, "outside"))


@pytest.mark.slow
def test_a_leaf_whose_layers_are_renewed_as_a_whole_is_read_as_a_whole() -> None:
    """What is no elementwise update, here one that mixes layers, is done to all layers together."""

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(params, batch)
        kernels = gradients["layers"]["kernel"]
        gradients["layers"]["kernel"] = kernels + 0.1 * jnp.cumsum(kernels, 0) + 0.1 * kernels[::-1]
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    check(step, state_of(SGD)[0], num_stages=2, num_microbatches=2)


def test_a_leaf_in_unequal_parts_is_read_and_saved_as_one(tmp_path: Path) -> None:
    """Its parts are split over their own submeshes, one of them along the layers themselves."""
    whole = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    submeshes = [Mesh(np.array(jax.devices()[first : first + 4]), ("x",)) for first in (0, 4)]
    shardings = {
        Rows(0, 0, 4): NamedSharding(submeshes[0], PartitionSpec("x")),
        Rows(0, 4, 6): NamedSharding(submeshes[1], PartitionSpec(None, "x")),
    }
    parts: dict[Rows | None, Any] = {
        rows: jax.device_put(part_of(whole, rows, sharding), sharding) for rows, sharding in shardings.items()
    }
    leaf = assembled(parts)
    state = {"stack": leaf, "other": jnp.ones(3)}
    assert jax.tree.structure(state) == jax.tree.structure({"stack": 0, "other": 0})
    np.testing.assert_array_equal(np.asarray(leaf), whole)
    np.testing.assert_array_equal(jnp.asarray(leaf), whole)
    assert all(part_of(leaf, rows, sharding) is parts[rows] for rows, sharding in shardings.items())
    other = NamedSharding(submeshes[1], PartitionSpec(None, "x"))
    np.testing.assert_array_equal(part_of(leaf, Rows(0, 3, 5), other), whole[3:5])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", as_arrays(state))
        checkpointer.wait_until_finished()
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "state")["stack"], whole)
