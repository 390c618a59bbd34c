"""Any step can be cut: those whose batch feeds back, those that train nothing, and whatever else steps do."""

from __future__ import annotations

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from pipelines import QUICKLY, assert_alike, crossing

import autopar
from autopar.errors import MicrobatchError
from autopar.pipeline.cutting import Cuttable
from autopar.program import program_of

WIDTH, BATCH = 16, 8
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))


# -- a batch that feeds back -----------------------------------------------------------------


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
        y = nn.BatchNorm(use_running_average=False)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        return nn.relu(y + (x if x.shape == y.shape else nn.Conv(self.features, (1, 1))(x)))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (4, 8):
            x = Block(features)(x)
        return nn.Dense(5)(jnp.mean(x, (1, 2)))


def images(seed: int) -> Any:
    one, other = jax.random.split(jax.random.key(seed))
    return jax.random.normal(one, (BATCH, 6, 6, 3)), jax.random.randint(other, (BATCH,), 0, 5)


@cache
def resnet_state() -> Any:
    variables = ResNet().init(jax.random.key(0), images(0)[0])
    return variables["params"], variables["batch_stats"], ADAM.init(variables["params"])


def resnet_step(state: Any, batch: Any) -> Any:
    params, statistics, moments = state

    def loss(params: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = ResNet().apply(variables, batch[0], mutable=["batch_stats"])
        right = jnp.mean(logits.argmax(-1) == batch[1])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return each.mean(), (updated["batch_stats"], right)

    (value, (statistics, right)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, moments = ADAM.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), statistics, moments), value, right


def test_batch_statistics_are_those_of_the_batch_where_it_is_not_split() -> None:
    pipeline = assert_alike(resnet_step, resnet_state(), images, num_stages=2, num_microbatches=1, tolerance=1e-4)
    assert all(shape[0] == BATCH and len(shape) == 4 for shape in crossing(pipeline, "inside"))
    assert all(shape == () for shape in crossing(pipeline, "outside"))


def test_batch_statistics_are_each_microbatchs_own_where_that_is_allowed() -> None:
    """Running statistics, too, are those of the unpipelined step in as many microbatches."""
    options: dict[str, Any] = {"mesh": Mesh(jax.devices()[:1], ("data",)), "hardware": "cpu-host", "donate": ()}
    step = autopar.parallelize(resnet_step, num_microbatches=2, per_microbatch_statistics=True, **options)
    plain = step.lower(resnet_state(), images(0)).compile(QUICKLY)
    options = {"num_stages": 2, "num_microbatches": 2, "own_statistics": True}
    assert_alike(resnet_step, resnet_state(), images, plain=plain, tolerance=1e-4, **options)


def test_what_would_change_is_said_before_it_is_changed() -> None:
    cuttable = Cuttable.of(program_of(resnet_step, (resnet_state(), images(0)), carry=None, donate=None))
    with pytest.raises(MicrobatchError, match=r"reduction over all 8 examples.*`per_microbatch_statistics=True`"):
        cuttable.layers([0], 2)


def contrastive_step(state: Any, batch: Any) -> Any:
    """Each example meets all others, and gradients are no sums over examples."""
    params, moments = state

    def loss(params: Any) -> jax.Array:
        one, other = batch
        for kernel in params:
            one, other = jnp.tanh(one @ kernel), jnp.tanh(other @ kernel)
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(one @ other.T)))

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = ADAM.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def vectors(seed: int) -> Any:
    one, other = jax.random.split(jax.random.key(seed))
    return jax.random.normal(one, (BATCH, WIDTH)), jax.random.normal(other, (BATCH, WIDTH))


def kernels(count: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), count)
    return [0.3 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]


def test_examples_may_meet_in_one_microbatch() -> None:
    state = kernels(6), ADAM.init(kernels(6))
    pipeline = assert_alike(contrastive_step, state, vectors, num_stages=2, num_microbatches=1)
    assert crossing(pipeline, "inside") == [(BATCH, WIDTH)] * 4
