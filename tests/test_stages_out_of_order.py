"""Stages that are not in the order of the devices: planned, run, saved, restored, explained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax

import autopar
from autopar.errors import ScheduleError
from autopar.hardware.profile import load
from autopar.pipeline.draw.svg import timeline_svg
from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.problem import Partition, PartitionProblem, StageCost
from autopar.report.submeshes import submesh_uses

#: The 8 devices of the tests as two hosts.
FOUR_A_HOST = replace(load("cpu-host"), devices_per_host=4)


@dataclass(frozen=True)
class Sizes:
    """The package's partitioner, for stages of these numbers of devices and no others.

    Args:
        far: whether stages next to each other are to be on different hosts.
    """

    sizes: tuple[int, ...]
    far: bool = False

    def partition(self, problem: PartitionProblem) -> Partition:
        """Equal runs of layers have these sizes."""

        def transfer_s(boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
            return float(same_host == self.far)

        count, num_layers = len(self.sizes), problem.num_layers
        starts = [round(n * num_layers / count) for n in range(count + 1)]

        def cost(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
            if first not in starts[:-1]:
                return None
            number = starts.index(first)
            wanted = last + 1 == starts[number + 1] and shape.num_devices == self.sizes[number] and not shape.option
            return problem.cost(first, last, shape) if wanted else None

        own = replace(problem, cost=cost, transfer_s=transfer_s, layer_keys=None, bound=None)
        return ExactPartitioner().partition(own)


def planned(step: Any, sizes: tuple[int, ...], far: bool = False, **options: Any) -> Any:
    return autopar.parallelize(
        step,
        stages=len(sizes),
        num_microbatches=4,
        schedule="1f1b",
        partitioner=Sizes(sizes, far),
        hardware=FOUR_A_HOST,
        cache=False,
        **options,
    )


@cache
def mlp() -> programs.Program:
    return programs.mlp(batch=64, width=64, num_layers=6, optimizer="adam")


@cache
def out_of_order() -> Any:
    step = planned(mlp().step, (2, 4, 2))
    step.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    return step


def devices_of(leaf: jax.Array) -> list[int]:
    return sorted(device.id for device in leaf.sharding.device_set)


@pytest.mark.slow
def test_a_partitioner_of_ones_own_puts_one_stage_on_each_submesh() -> None:
    def plan(schedule: str, stages: Any, sizes: tuple[int, ...]) -> Any:
        step = autopar.parallelize(
            mlp().step, stages=stages, num_microbatches=8, schedule=schedule, partitioner=Sizes(sizes), cache=False,
            num_devices=8, hardware=FOUR_A_HOST,
        )  # fmt: skip
        return step.plan(*mlp().abstract_args())

    for stages in (2, "auto"):
        assert [len(stage.devices) for stage in plan("chimera", stages, (4, 4)).stages] == [4, 4]
        assert [len(stage.devices) for stage in plan("auto", stages, (4, 4)).stages] == [4, 4]
    for schedule in ("interleaved", "zb-v"):
        with pytest.raises(ScheduleError, match=r"several stages on each submesh.*leave out partitioner="):
            plan(schedule, "auto", (4, 4))


def test_a_step_out_of_order_trains_as_on_one_device(tmp_path: Path) -> None:
    """The stages of two devices share a host, and the one between them has the other."""
    step, reference = out_of_order(), jax.jit(mlp().step)
    plan = step.latest_plan
    assert [list(stage.devices) for stage in plan.stages] == [[0, 1], [4, 5, 6, 7], [2, 3]]
    plan.save(tmp_path / "p.json")
    assert autopar.load_plan(tmp_path / "p.json") == plan
    saved = autopar.parallelize(plan=tmp_path / "p.json")(mlp().step)
    for run in (step, saved):
        state = run.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
        assert devices_of(state.params["Dense_0"]["kernel"]) == [0, 1]
        assert devices_of(state.params["Dense_2"]["kernel"]) == [4, 5, 6, 7]
        assert devices_of(state.params["Dense_5"]["kernel"]) == [2, 3]
        expected = jax.jit(mlp().create_state)(jax.random.key(0))
        for seed in range(3):
            state, loss = run(state, run.shard_batch(mlp().make_batch(seed)))
            expected, expected_loss = reference(expected, mlp().make_batch(seed))
            np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state.params, expected.params)


def test_a_plan_out_of_order_is_explained() -> None:
    plan = out_of_order().latest_plan
    text = str(autopar.explain(plan))
    assert "3 stages on 2 + 4 + 2 devices" in text and "4-7" in text
    ElementTree.fromstring(timeline_svg(plan.timeline()))
    assert [use.devices for use in submesh_uses(plan, plan.timeline())] == [(0, 1), (4, 7), (2, 3)]
    assert autopar.diff(plan, plan).same_state


def scanned(state: Any, batch: Any) -> Any:
    """Eight layers in a loop, by momentum."""

    def loss_of(params: Any) -> jax.Array:
        h, _ = lax.scan(lambda h, kernel: (h + jnp.tanh(h @ kernel), None), batch, params["layers"])
        return jnp.mean((h @ params["last"]) ** 2)

    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), loss


def created(key: jax.Array) -> Any:
    params = {"layers": 0.3 * jax.random.normal(key, (8, 16, 16)), "last": jnp.eye(16)}
    return params, jax.tree.map(jnp.zeros_like, params)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("sizes", "begins"), [((2, 2, 2, 2), [0, 4, 2, 6]), ((2, 4, 2), [0, 4, 2])], ids=["equal", "unequal"]
)
def test_a_loop_is_stacked_out_of_order(sizes: tuple[int, ...], begins: list[int], tmp_path: Path) -> None:
    """Parts of one leaf are in the order of the layers, wherever their devices are, also in a checkpoint."""
    step = planned(scanned, sizes, far=True)
    batch = jax.random.normal(jax.random.key(1), (16, 16))
    state, expected = step.init(created, jax.random.key(0), batch=batch), jax.jit(created)(jax.random.key(0))
    assert [stage.devices.start for stage in step.latest_plan.stages] == begins
    for number in range(3):
        state, loss = step(state, batch)
        expected, expected_loss = jax.jit(scanned)(expected, batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        if number == 1:
            before = [np.array(leaf) for leaf in jax.tree.leaves(state)]
            with autopar.Checkpoints(tmp_path, step) as kept:
                kept.save(1, state)
                state = kept.restore(created, jax.random.key(0), batch=batch)
            for one, other in zip(jax.tree.leaves(state), before, strict=True):
                np.testing.assert_array_equal(np.asarray(one), other)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-4, atol=1e-5)
