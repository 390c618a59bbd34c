"""Any step can be cut into stages: also steps whose batch feeds back, steps without training, and others."""

from __future__ import annotations

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from pipelines import QUICKLY, assert_alike, crossing, pipelined

import autopar
from autopar.errors import MicrobatchError
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.transforms.program import program_of

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


@pytest.mark.slow
def test_batch_statistics_are_those_of_the_batch_where_it_is_not_split() -> None:
    pipeline = assert_alike(resnet_step, resnet_state(), images, num_stages=2, num_microbatches=1)
    assert all(shape[0] == BATCH and len(shape) == 4 for shape in crossing(pipeline, "inside"))
    assert all(shape == () for shape in crossing(pipeline, "outside"))


@pytest.mark.slow
def test_batch_statistics_are_each_microbatchs_own_where_that_is_allowed() -> None:
    """Running statistics, too, are those of the unpipelined step in as many microbatches."""
    options: dict[str, Any] = {"mesh": Mesh(jax.devices()[:1], ("data",)), "hardware": "cpu-host", "donate": ()}
    step = autopar.parallelize(resnet_step, num_microbatches=2, per_microbatch_statistics=True, **options)
    plain = step.lower(resnet_state(), images(0)).compile(QUICKLY)
    options = {"num_stages": 2, "num_microbatches": 2, "own_statistics": True}
    assert_alike(resnet_step, resnet_state(), images, plain=plain, **options)


@pytest.mark.slow
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


def sharpness_aware_step(state: Any, batch: Any) -> Any:
    """A second forward pass at parameters that all gradients of the first backward pass have moved."""
    params, moments = state

    def loss(params: Any) -> jax.Array:
        h = batch[0]
        for kernel in params:
            h = jnp.tanh(h @ kernel)
        return jnp.mean((h - batch[1]) ** 2)

    first = jax.grad(loss)(params)
    moved = jax.tree.map(lambda p, g: p + 0.1 * g / optax.global_norm(first), params, first)
    value, gradients = jax.value_and_grad(loss)(moved)
    updates, moments = ADAM.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_forward_pass_may_follow_the_backward_pass(schedule: str) -> None:
    state = kernels(4), ADAM.init(kernels(4))
    assert_alike(sharpness_aware_step, state, vectors, num_stages=2, num_microbatches=1, schedule=schedule)


# -- what else steps do ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_of_many_parts() -> None:
    """Two losses, outputs of examples, layers computed again, dropout by a key that is state, a norm to clip by, a
    schedule that counts, averaged parameters: between stages pass an activation, its cotangent, and scalars."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(rate, eps=1e-3))

    def step(state: Any, batch: Any) -> Any:
        params, moments, averages, count, key = state
        key, own = jax.random.split(key)

        def layer(h: jax.Array, kernel: jax.Array, i: int) -> jax.Array:
            kept = jax.random.bernoulli(jax.random.fold_in(own, i), 0.8, h.shape)
            return h + jnp.where(kept, jnp.tanh(h @ kernel), 0.0)

        def loss(params: Any) -> Any:
            h, early = batch[0], jnp.zeros(())
            for i, kernel in enumerate(params):
                h = jax.checkpoint(layer, static_argnums=2)(h, kernel, i)
                early = early + (jnp.mean((h - batch[1]) ** 2) if i == 1 else 0.0)
            return jnp.mean((h - batch[1]) ** 2) + 0.3 * early, {"early": early, "given": h, "most": jnp.max(h)}

        (value, more), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        averages = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, averages, params)
        return (params, moments, averages, count + 1, key), value, more

    state = kernels(6), optimizer.init(kernels(6)), kernels(6), jnp.zeros((), jnp.int32), jax.random.key(5)
    pipeline = assert_alike(step, state, vectors, num_stages=2, num_microbatches=2)
    assert crossing(pipeline, "inside") == [(BATCH // 2, WIDTH)] * 2
    assert all(shape == () for shape in crossing(pipeline, "outside"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["layers", "loop"])
def test_each_stage_computes_again_what_is_its_own(form: str) -> None:
    """All layers are in one `jax.checkpoint`, and what it is given waits at one barrier."""

    def forward(params: Any, x: jax.Array) -> jax.Array:
        if form == "loop":
            return jax.lax.scan(lambda h, kernel: (h + jnp.tanh(h @ kernel), None), x, params)[0]
        for kernel in params:
            x = x + jnp.tanh(x @ kernel)
        return x

    params = jnp.stack(kernels(6)) if form == "loop" else kernels(6)
    step = module_step(ADAM, jax.checkpoint(forward))
    pipeline = assert_alike(step, (params, ADAM.init(params)), vectors, num_stages=2, num_microbatches=2)
    assert crossing(pipeline, "inside") == [(BATCH // 2, WIDTH)] * 2
    assert all(shape == () for shape in crossing(pipeline, "outside"))
    for stage in pipeline.stages:
        made = [equation.primitive for equation in stage.program.program.trace.equations]
        assert made.count("tanh") == (2 if form == "loop" else 6)  # forward, and again


def module_step(optimizer: Any, apply: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(lambda p: jnp.mean((apply(p, batch[0]) - batch[1]) ** 2))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


@pytest.mark.slow
def test_layers_of_equinox_that_are_mapped_and_scanned() -> None:
    eqx = pytest.importorskip("equinox")
    made = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(jax.random.split(jax.random.key(0), 5))
    arrays, static = eqx.partition(made, eqx.is_array)

    def apply(arrays: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: Any) -> Any:
            return h + jnp.tanh(jax.vmap(eqx.combine(one, static))(h)), None

        return jax.lax.scan(layer, x, arrays)[0]

    step = module_step(optax.adafactor(1e-2, min_dim_size_to_factor=8), apply)
    state = arrays, optax.adafactor(1e-2, min_dim_size_to_factor=8).init(arrays)
    pipeline = assert_alike(step, state, vectors, num_stages=2, num_microbatches=2)
    assert crossing(pipeline, "inside") == [(BATCH // 2, WIDTH)] * 2
    assert all(shape == () for shape in crossing(pipeline, "outside"))


@pytest.mark.slow
def test_layers_of_nnx_that_are_mapped_and_scanned() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(self.linear(x))

    layers = nnx.split_rngs(splits=6)(nnx.vmap(Layer, in_axes=0, out_axes=0))(nnx.Rngs(0))
    structure, params = nnx.split(layers)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda h, layer: layer(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, nnx.merge(structure, params))

    pipeline = assert_alike(
        module_step(ADAM, apply), (params, ADAM.init(params)), vectors, num_stages=2, num_microbatches=2
    )
    assert crossing(pipeline, "inside") == [(BATCH // 2, WIDTH)] * 2


# -- no training -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["layers", "loop"])
def test_a_forward_pass(form: str) -> None:
    """Weights are told from the batch by what comes out, though they are larger."""

    def predict(params: Any, x: jax.Array) -> Any:
        if form == "loop":
            x, _ = jax.lax.scan(lambda h, kernel: (h + jnp.tanh(h @ kernel), None), x, params)
        else:
            for kernel in params:
                x = x + jnp.tanh(x @ kernel)
        return {"logits": x[:, :5], "most": jnp.argmax(x, -1)}

    params = jnp.stack(kernels(6)) if form == "loop" else kernels(6)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "schedule": "inference", "mesh": "4"}
    run, pipeline = pipelined(predict, (params, vectors(0)[0]), **options)
    found, expected = run(params, vectors(0)[0]), predict(params, vectors(0)[0])
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["most"], expected["most"])
    assert crossing(pipeline, "inside") == [(BATCH // 2, WIDTH)]
    taken = [sum(port.kind == "argument" for port in stage.program.inputs) for stage in pipeline.stages]
    assert sum(taken) == (6 if form == "layers" else 2) + 1  # each weight on one stage, and the examples
