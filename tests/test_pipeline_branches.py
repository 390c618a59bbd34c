"""A model that forks and joins: branches run side by side, on devices of their own."""

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
from pipelines import QUICKLY, planned_stages

from autopar.pipeline.cutting import Cuttable, edges_of
from autopar.pipeline.forks import branch_layers
from autopar.pipeline.run import Pipeline
from autopar.pipeline.schedules.any_edges import as_they_come
from autopar.pipeline.simulate import simulate
from autopar.pipeline.tasks import Task
from autopar.program import program_of

BATCH, CHANNELS = 8, 4
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
    return cuttable, branch_layers(cuttable.flow, least_share=0.01)


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


#: Of the eleven layers, the stages, and where each stands: of each block, two branches here and two there.
STAGE_OF = (0, 1, 2, 2, 1, 3, 4, 5, 5, 4, 6)
SUBMESH_OF = (0, 0, 1, 0, 0, 1, 0)


def test_branches_on_other_devices_give_the_steps_numbers() -> None:
    cuttable, layer_of = layered()
    stages = cuttable.layered(layer_of, 2).stages(STAGE_OF)
    edges = edges_of(stages)
    assert edges == ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6))
    schedule = as_they_come(edges, SUBMESH_OF, 2)
    planned = planned_stages(stages, SUBMESH_OF, mesh="4")
    pipeline = Pipeline(planned, schedule, len(cuttable.flow.trace.outputs), {}, compiler_options=QUICKLY)
    tree = jax.tree.structure(jax.eval_shape(step, state(), batch_of(0)))
    here = there = state()
    for seed in range(2):
        here, loss = jax.tree.unflatten(tree, pipeline.run(jax.tree.leaves((here, batch_of(seed)))))
        there, expected = jax.jit(step)(there, batch_of(seed))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_heavy_branches_side_by_side_take_less_time_than_a_chain(num_microbatches: int) -> None:
    """By FLOPs: on two submeshes, against the best chain of two stages of the same layers."""
    cuttable, layer_of = layered()
    work = np.zeros(max(layer_of) + 1)
    for i, layer in zip(cuttable.flow.forward, layer_of, strict=True):
        work[layer] += cuttable.flow.flops(cuttable.flow.units[i])

    def makespan(stage_of: Sequence[int], edges: Any, submesh_of: Sequence[int]) -> float:
        seconds = np.bincount(stage_of, weights=work, minlength=len(submesh_of))

        def of(task: Task) -> float:
            return {"forward": 1.0, "backward": 2.0}.get(task.phase, 0.0) * float(seconds[task.stage])

        return simulate(as_they_come(edges, submesh_of, num_microbatches, seconds=of), of).makespan_s

    chains = [
        makespan([int(layer >= cut) for layer in range(len(work))], [(0, 1)], [0, 1]) for cut in range(1, len(work))
    ]
    edges = ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6))
    found = makespan(STAGE_OF, edges, SUBMESH_OF)
    assert found < (1.0 if num_microbatches == 1 else 1.3) * min(chains)
