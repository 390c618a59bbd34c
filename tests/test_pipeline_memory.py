"""The memory of a pipeline step: what its schedule has in flight, each value until its last use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pipelines import pipelined

from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.schedule.in_flight import in_flight
from benchmarks.pipeline.memory_count import Held, run_counted

WIDTH, LAYERS, BATCH = 16, 4, 1024


def step(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    def loss(params: list[jax.Array]) -> jax.Array:
        x = batch[0]
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean((x - batch[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments() -> tuple[Any, Any]:
    params = [jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(jax.random.key(0), LAYERS)]
    return params, (jnp.ones((BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH)))


def counted(schedule: str, num_microbatches: int) -> tuple[Pipeline, Held]:
    run, pipeline = pipelined(step, arguments(), num_stages=4, num_microbatches=num_microbatches, schedule=schedule)
    results, held = run_counted(pipeline, jax.tree.leaves(arguments()))
    for one, other in zip(results, jax.tree.leaves(run(*arguments())), strict=True):
        assert jnp.array_equal(one, other)
    return pipeline, held


@pytest.mark.slow
def test_1f1b_holds_less_than_gpipe_by_what_it_has_less_in_flight() -> None:
    (one, less), (other, more) = counted("1f1b", 8), counted("gpipe", 8)
    assert less.flight_bytes == more.flight_bytes and min(less.flight_bytes) > 0
    for stage, flight in enumerate(less.flight_bytes):
        fewer = in_flight(other.schedule)[stage][stage] - in_flight(one.schedule)[stage][stage]
        assert fewer == 4 + stage
        assert more.loop_bytes[stage] - less.loop_bytes[stage] == pytest.approx(fewer * flight, rel=0.12)


def test_results_lie_as_arguments_do_and_the_batch_stays() -> None:
    _, pipeline = pipelined(step, arguments(), num_stages=4, num_microbatches=4)
    state, batch = arguments()
    shardings = pipeline.in_shardings
    leaves = [jax.device_put(leaf, shardings[i]) for i, leaf in enumerate(jax.tree.leaves((state, batch)))]
    results = pipeline.run(leaves)
    jax.block_until_ready(results)
    assert not any(leaf.is_deleted() for leaf in leaves[LAYERS:])
    assert [pipeline.out_shardings[i] for i in range(LAYERS)] == [shardings[i] for i in range(LAYERS)]
    assert [one.sharding for one in results] == [pipeline.out_shardings[i] for i in range(len(results))]
    again = pipeline.run([*results[:LAYERS], *leaves[LAYERS:]])
    expected = step(step(*arguments())[0], batch)
    for one, other in zip(again, jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_nothing_stays_after_a_step() -> None:
    _, pipeline = pipelined(step, arguments(), num_stages=4, num_microbatches=4)
    leaves = jax.tree.leaves(arguments())
    jax.block_until_ready(pipeline.run(leaves))  # compiled, with its constants
    before = {id(array) for array in jax.live_arrays()}
    results = pipeline.run(leaves)
    jax.block_until_ready(results)
    assert {id(array) for array in jax.live_arrays()} - before == set(map(id, results))
