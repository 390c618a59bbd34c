"""A model that forks and joins: its branches run concurrently, on devices of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from partitions import objective_named
from pipelines import QUICKLY, crossing, planned_stages

from autopar.pipeline.cut.branches import branch_layers
from autopar.pipeline.cut.exchanges import exchanges_of
from autopar.pipeline.cut.stage_programs import Cuttable, StageProgram
from autopar.pipeline.partition.branches import Branches
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.problem import PartitionProblem, StageCost
from autopar.pipeline.partition.sends import edges_between
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.schedule.dag import Backward, list_schedule
from autopar.pipeline.schedule.in_flight import in_flight
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Edges, Task, chain
from autopar.transforms.program import program_of
from tests.planned import plan_program

BATCH, CHANNELS = 8, 20
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


class Inception(nn.Module):
    """Four branches: of one, three and five pixels, and a pooling."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        one = nn.Conv(CHANNELS, (1, 1))(x)
        three = nn.Conv(CHANNELS, (3, 3))(nn.relu(nn.Conv(CHANNELS, (1, 1))(x)))
        five = nn.Conv(CHANNELS, (5, 5))(nn.relu(nn.Conv(CHANNELS, (1, 1))(x)))
        pooled = nn.Conv(CHANNELS, (1, 1))(nn.max_pool(x, (3, 3), (1, 1), "SAME"))
        return nn.relu(jnp.concatenate([one, three, five, pooled], -1))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(CHANNELS, (3, 3))(x))
        for _ in range(2):
            x = Inception()(x)
        return nn.Dense(5)(jnp.mean(x, (1, 2)))


def batch_of(seed: int) -> Any:
    one, other = jax.random.split(jax.random.key(seed))
    return jax.random.normal(one, (BATCH, 8, 8, 3)), jax.random.randint(other, (BATCH,), 0, 5)


@cache
def state() -> Any:
    params = Network().init(jax.random.key(0), batch_of(0)[0])
    return params, OPTIMIZER.init(params)


def step(state: Any, batch: Any) -> Any:
    params, moments = state

    def loss(params: Any) -> jax.Array:
        logits: Any = Network().apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


@cache
def layered() -> tuple[Cuttable, list[int]]:
    cuttable = Cuttable.of(program_of(step, (state(), batch_of(0)), carry=None, donate=None))
    return cuttable, branch_layers(cuttable.flow, cuttable.chain)


@pytest.mark.slow
def test_branches_are_layers_of_their_own() -> None:
    """The stem, four branches, what joins them and leads to the next four, and the rest."""
    cuttable, layer_of = layered()
    assert sorted(set(layer_of)) == list(range(11))
    made = {layer: set[str]() for layer in layer_of}
    for i, layer in zip(cuttable.flow.forward, layer_of, strict=True):
        unit = cuttable.flow.units[i]
        made[layer] |= {one.primitive for one in cuttable.flow.trace.equations[unit.start : unit.stop]}
    assert [layer for layer, names in made.items() if "concatenate" in names] == [5, 10]
    assert {layer for layer, names in made.items() if any("pool" in n or "window" in n for n in names)} == {4, 9}


@cache
def work() -> np.ndarray:
    """FLOPs of the forward pass, by layer; all together 1."""
    cuttable, layer_of = layered()
    flops = [cuttable.flow.flops(cuttable.flow.units[i]) for i in cuttable.flow.forward]
    found = np.bincount(layer_of, weights=flops)
    return found / found.sum()


@cache
def found() -> tuple[tuple[StageProgram, ...], tuple[int, ...], tuple[int, ...]]:
    """The stages of two microbatches, the stage of each layer, and where each stage stands, found by FLOPs for two
    submeshes on which an operator that is split gains nothing."""
    cuttable, layer_of = layered()

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        taken = float(work()[first : last + 1].sum())
        return StageCost(forward_s=taken, backward_s=2 * taken)

    problem = PartitionProblem(
        num_layers=len(work()),
        cluster=Cluster((DeviceGroup("cpu", 1, 2),)),
        cost=cost,
        transfer_s=lambda *_: 1e-3,
        objective=objective_named("1f1b", 1),
        budget_bytes={"cpu": 1.0},
    )
    whole = edges_between(exchanges_of(cuttable.layered(layer_of, 2).stages(range(len(work())))))
    branches = Branches(problem, whole, lambda layer, part, same_host: 1e-3)
    stages = ExactPartitioner().partition(branches.with_split_submeshes()).stages
    laid = branches.forked_stages(stages)
    places = sorted({(stage, part) for stage, part in laid.place_of})
    return (
        cuttable.settled(layer_of, laid.stage_of, 2),
        laid.stage_of,
        tuple(places.index(place) for place in laid.place_of),
    )


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["whole", "split"])
def test_branches_on_other_devices_give_the_steps_numbers(backward: Backward) -> None:
    cuttable, _ = layered()
    stages, _, submesh_of = found()
    assert max(submesh_of) == 1
    planned = planned_stages(
        stages,
        [(submesh,) for submesh in submesh_of],
        lambda _, stage, num_devices: plan_program(stage.program, mesh=str(num_devices), hardware="cpu-host"),
    )
    schedule = list_schedule(edges_between(exchanges_of(stages)), submesh_of, 2, backward=backward)
    pipeline = Pipeline(planned, schedule, len(cuttable.flow.trace.outputs), {}, compiler_options=QUICKLY)
    tree = jax.tree.structure(jax.eval_shape(step, state(), batch_of(0)))
    here = there = state()
    for seed in range(2):
        here, loss = jax.tree.unflatten(tree, pipeline.run(jax.tree.leaves((here, batch_of(seed)))))
        there, expected = jax.jit(step)(there, batch_of(seed))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    passed = {"there": list[tuple[int, ...]](), "back": list[tuple[int, ...]]()}
    makers = {port: s for s, stage in enumerate(stages) for port in stage.outputs if port.kind == "inside"}
    for s, stage in enumerate(stages):
        structs = jax.tree.leaves(stage.program.trace.arguments)
        for port, struct in zip(stage.inputs, structs, strict=True):
            if port.kind == "inside":
                passed["there" if makers[port] < s else "back"].append(struct.shape)
    assert sorted(passed["there"]) == sorted(passed["back"])  # of what branches share, one cotangent from each stage
    assert all(len(shape) == 4 for shape in passed["there"])
    assert {len(shape) for shape in crossing(pipeline, "outside")} == {0}


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_list_scheduling_of_a_chain_is_1f1b(num_microbatches: int) -> None:
    schedule = list_schedule(chain(4), range(4), num_microbatches)
    expected = build("1f1b", 4, num_microbatches)
    assert in_flight(schedule) == in_flight(expected)
    assert simulate(schedule, lambda task: 1).makespan_s == simulate(expected, lambda task: 1).makespan_s


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_list_scheduling_fills_bubbles_with_weight_parts(num_microbatches: int) -> None:
    """A fork on two submeshes, and a chain: no longer than with the backward pass in one, and shorter where the last
    stage leaves the first one waiting."""
    seconds = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}

    def makespan(edges: Edges, submesh_of: Sequence[int], backward: Backward) -> float:
        schedule = list_schedule(
            edges, submesh_of, num_microbatches, seconds=lambda task: seconds.get(task.phase, 0.0), backward=backward
        )
        phases = {task.phase for task in schedule.tasks} - {"forward", "update"}
        assert phases == ({"input", "weight"} if backward == "split" else {"backward"})
        return simulate(schedule, lambda task: seconds.get(task.phase, 0.0)).makespan_s

    fork = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert makespan(fork, [0, 0, 1, 0], "split") <= makespan(fork, [0, 0, 1, 0], "whole")
    assert makespan(chain(2), range(2), "split") < makespan(chain(2), range(2), "whole")


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_heavy_branches_side_by_side_take_less_time_than_a_chain(num_microbatches: int) -> None:
    """Simulated by FLOPs on two submeshes, against all chains of two stages of the same layers."""
    stages, stage_of, submesh_of = found()

    def makespan(stage_of: Sequence[int], edges: Edges, submesh_of: Sequence[int]) -> float:
        seconds = np.bincount(stage_of, weights=work())

        def of(task: Task) -> float:
            return {"forward": 1.0, "backward": 2.0}.get(task.phase, 0.0) * float(seconds[task.stage])

        return simulate(list_schedule(edges, submesh_of, num_microbatches, seconds=of), of).makespan_s

    chains = [[int(layer >= cut) for layer in range(len(work()))] for cut in range(1, len(work()))]
    best = min(makespan(chain, [(0, 1)], [0, 1]) for chain in chains)
    assert makespan(stage_of, edges_between(exchanges_of(stages)), submesh_of) < best
