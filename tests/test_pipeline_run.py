"""A pipeline step computes what the step computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import pipelined
from same_steps import Trained, _gradients, _initial, assert_same, train

from autopar.pipeline.run.executor import Pipeline
from benchmarks.zoo import small
from benchmarks.zoo.training import Training

Params = list[tuple[jax.Array, jax.Array]]
WIDTH, LAYERS, BATCH = 32, 8, 16


def optimizer() -> optax.GradientTransformation:
    """The norm that it clips by is that of all stages together."""
    return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))


def mlp_step(state: tuple[Params, Any], batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
    params, moments = state

    def loss(params: Params) -> jax.Array:
        x = batch[0]
        for kernel, bias in params:
            x = jnp.tanh(x @ kernel + bias)
        return jnp.mean((x - batch[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = optimizer().update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def mlp_state(num_layers: int = LAYERS) -> tuple[Params, Any]:
    keys = jax.random.split(jax.random.key(0), num_layers)
    params = [(0.3 * jax.random.normal(key, (WIDTH, WIDTH)), jnp.zeros(WIDTH)) for key in keys]
    return params, optimizer().init(params)


def mlp_batch(seed: int, size: int = BATCH) -> tuple[jax.Array, jax.Array]:
    one, other = jax.random.split(jax.random.key(seed))
    return jax.random.normal(one, (size, WIDTH)), jax.random.normal(other, (size, WIDTH))


def check_mlp(steps: int = 2, size: int = BATCH, **options: Any) -> None:
    run, _ = pipelined(mlp_step, (mlp_state(), mlp_batch(0, size)), **options)
    plain = jax.jit(mlp_step)
    here = there = mlp_state()
    for seed in range(steps):
        here, loss = run(here, mlp_batch(seed, size))
        there, expected = plain(there, mlp_batch(seed, size))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(6)
@pytest.mark.contract
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("schedule", ["none", "gpipe", "1f1b", "zb-h1"])
def test_every_schedule_gives_the_steps_numbers(schedule: str, num_stages: int) -> None:
    check_mlp(schedule=schedule, num_stages=num_stages, num_microbatches=4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "virtual", "num_microbatches"),
    [
        ("interleaved", 2, 4),
        ("interleaved", 2, 2),
        ("interleaved-zb", 2, 4),
        ("zb-v", 2, 4),
        ("zb-v", 2, 1),
        ("dualpipe-v", 2, 4),
    ],
)
def test_stages_that_share_a_submesh(schedule: str, virtual: int, num_microbatches: int) -> None:
    check_mlp(schedule=schedule, num_stages=2, virtual=virtual, num_microbatches=num_microbatches)


def test_stages_that_are_split_over_two_axes() -> None:
    check_mlp(schedule="1f1b", num_stages=2, num_microbatches=2, mesh="2x2")


def test_a_batch_of_one_example() -> None:
    check_mlp(size=1, num_stages=2, num_microbatches=1)


def test_one_microbatch() -> None:
    check_mlp(schedule="gpipe", num_stages=2, num_microbatches=1)


def passing_bytes(pipeline: Pipeline) -> tuple[int, int]:
    """What one microbatch sends from stage to stage, to later and to earlier ones."""
    stages = [stage.program for stage in pipeline.stages]
    makers = {port: s for s, stage in enumerate(stages) for port in stage.outputs if port.kind == "inside"}
    sums = [0, 0]
    for s, stage in enumerate(stages):
        for port, struct in zip(stage.inputs, jax.tree.leaves(stage.program.trace.arguments), strict=True):
            if port.kind == "inside":
                sums[makers[port] > s] += struct.size * struct.dtype.itemsize
    return sums[0], sums[1]


def in_stages(training: Training, **options: Any) -> Trained:
    state, batch = _initial(training), training.make_batch(0)
    run, pipeline = pipelined(training.step, (state, batch), **options)
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    for seed in range(2):
        state, loss = run(state, training.make_batch(seed))
        losses.append(float(loss))
        gradients = gradients or _gradients(state)
    forward, backward = passing_bytes(pipeline)
    assert 0 < backward <= forward  # no more cotangents come back than activations were sent
    return Trained(losses, gradients)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_stages"), [("gpt2", 2), ("gpt2", 4), ("bert", 2), ("bart", 4), ("vit", 2)])
def test_models_of_others(name: str, num_stages: int) -> None:
    training = getattr(small, name)()
    assert_same(in_stages(training, num_stages=num_stages, num_microbatches=2), train(training))


@pytest.mark.slow
@pytest.mark.parametrize("option", [0, 2])
def test_what_is_computed_again_in_the_backward_pass(option: int) -> None:
    """Little or nearly all of it: the numbers are the same."""
    check_mlp(num_stages=2, num_microbatches=4, option=option)
    training = small.gpt2()
    assert_same(in_stages(training, num_stages=2, num_microbatches=2, option=option), train(training))
