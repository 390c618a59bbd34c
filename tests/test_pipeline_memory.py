"""The memory of a pipeline step: what its schedule has in flight, each value until its last use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pipelines import pipelined

import autopar
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.step import PipelinedStep
from autopar.pipeline.schedule.in_flight import bytes_during_tasks, in_flight
from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind
from autopar.pipeline.schedule.tasks import Orders, Task
from autopar.transforms.program import program_of
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


def scanned(params: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    def loss(params: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), batch[0], params)
        return jnp.mean((x - batch[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return params - 0.1 * gradients, value


def in_phases(shape: PipelineShape) -> Orders:
    """All forward passes, then all input parts, then all weight parts: everything waits."""
    count, phases = range(shape.num_microbatches), ("forward", "input", "weight")
    return tuple(
        tuple(Task(stage, microbatch, phase) for phase in phases for microbatch in count)  # type: ignore[arg-type]
        for stage in range(shape.num_submeshes)
    )


@pytest.mark.parametrize("has_loop", [False, True])
def test_what_waits_for_weight_parts_is_predicted(has_loop: bool) -> None:
    """The peak of a schedule in which every microbatch waits, less that of GPipe, is what the costs say."""
    made, (params, batch) = (scanned, step)[not has_loop], arguments()
    given = (jnp.stack(params) if has_loop else params), batch
    program = program_of(made, given, carry=None, donate=None)
    waiting = ScheduleKind(name="phases", description="All of a kind.", orders=in_phases, backward="split")
    peaks: list[tuple[float, int]] = []
    for schedule in (waiting, "gpipe"):
        options: dict[str, Any] = {"stages": 2, "num_microbatches": 8, "hardware": "cpu-host", "num_devices": 2}
        plan = autopar.plan(made, *given, schedule=schedule, cache=False, **options)
        assert isinstance(plan, PipelinePlan)
        _, held = run_counted(PipelinedStep(plan, program, jax.devices()[:2]).pipeline, jax.tree.leaves(given))
        predicted = bytes_during_tasks(plan.tasks(), [stage.cost for stage in plan.stages])
        peaks.append((max(predicted[1]), held.loop_bytes[1]))
    (more, measured_more), (less, measured_less) = peaks
    assert more > less
    assert measured_more - measured_less == pytest.approx(more - less, rel=0.01)


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
