"""Branches of a model on devices of their own where that is fastest: found, planned, reported, saved, run, verified."""

from __future__ import annotations

import itertools
import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitions import objective_named
from pipelines import tanh_layers

import autopar
from autopar.errors import ClusterError, PlanFileError
from autopar.hardware.profile import load
from autopar.pipeline.cut.branches import forked_layers
from autopar.pipeline.cut.exchanges import exchanges_of_layers
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.branches import Branches
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, Submesh, SubmeshShape
from autopar.pipeline.partition.problem import PartitionProblem, Stage, StageCost
from autopar.pipeline.schedule.dag import NAMES, side_by_side
from autopar.transforms.program import Program, program_of

WIDTH, BATCH, TOWERS = 512, 16, 4
H100 = load("h100-sxm")
#: Few examples, so that kernels take as long as they take to start: splitting an operator saves nothing.
OPTIONS: dict[str, Any] = {"stages": "auto", "num_microbatches": 1, "hardware": H100}


def create(key: jax.Array) -> Any:
    """Parameters: a stem, towers that read it, a head that reads them all."""
    kernels = jax.random.normal(key, (1 + 2 * TOWERS, WIDTH, WIDTH)) / WIDTH**0.5
    towers = [list(kernels[1 + 2 * n : 3 + 2 * n]) for n in range(TOWERS)]
    return {"stem": kernels[0], "towers": towers, "head": kernels[0][:, :8]}


def step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        shared = jnp.tanh(x @ params["stem"])
        ends = [jnp.tanh(jnp.tanh(shared @ one) @ other) for one, other in params["towers"]]
        return jnp.mean((sum(ends) @ params["head"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def batch_of(seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (BATCH, WIDTH))


@cache
def plan() -> Any:
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    return autopar.plan(step, *shapes, num_devices=4, **OPTIONS)


def on_devices(plan: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("device",))
    return autopar.parallelize(plan=plan, mesh=mesh)(step)


# -- what is chosen --------------------------------------------------------------------------


@pytest.mark.slow
def test_branches_are_chosen_where_they_are_fastest() -> None:
    found = plan()
    assert isinstance(found, autopar.PipelinePlan) and not found.is_chain
    assert found.prediction.step_time_s == pytest.approx(found.timeline().makespan_s)
    others = [one.step_time_s for one in found.tried if one.schedule not in NAMES.values()]
    assert "" in [one.schedule for one in found.tried], "one program was looked at"
    assert found.prediction.step_time_s < min(others)
    (fork,) = found.side_by_side()
    assert len(fork) > 1
    submeshes = {found.submesh_of[stage] for branch in fork for stage in branch}
    assert len(submeshes) == len(found.prediction.stage_bytes) == 4


@pytest.mark.slow
def test_what_one_program_computes_faster_is_not_cut_into_branches() -> None:
    """Large products: what splits them over two devices sends little of what branches would."""
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.ShapeDtypeStruct((2**16, WIDTH), jnp.float32)
    found = autopar.plan(step, *shapes, num_devices=2, **OPTIONS)
    assert isinstance(found, autopar.Plan)


def layers_of(program: Program) -> Any:
    cuttable = Cuttable.of(program)
    return forked_layers(cuttable.flow, cuttable.chain)


def program(step: Any, *shapes: Any) -> Program:
    return program_of(step, shapes, carry=None, donate=None)


def test_a_chain_and_a_light_branch_have_no_layers_that_fork() -> None:
    kernels = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((32, 512), jnp.float32)
    assert layers_of(program(tanh_layers, kernels, x)) is None

    def with_a_scale(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            h = x
            for kernel in params:
                h = jnp.tanh(h @ kernel) * jax.nn.sigmoid(h)  # what is beside a product is cheap
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    assert layers_of(program(with_a_scale, kernels, x)) is None


def test_layers_that_fork_are_in_order_and_say_what_passes() -> None:
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    layers = layers_of(program(step, *shapes))
    assert all(maker < reader for maker, reader in layers.edges)
    readers = [one.readers for one in layers.passing if len(one.readers) > 1]
    assert readers and {len(one) for one in readers} == {TOWERS}
    towers = [layers.keys[one] for one in readers[0]]
    assert len(set(towers)) < TOWERS, "equal towers are seen to be so"
    stage_of = [0 if layer < max(readers[0]) else 1 for layer in range(len(layers.keys))]
    there, back = exchanges_of_layers(layers.passing, stage_of, trains=True)
    assert (there.source, there.target, back.source, back.target) == (0, 1, 1, 0)
    assert there.num_bytes == back.num_bytes >= BATCH * WIDTH * 4


def test_towers_that_read_data_of_their_own_are_branches() -> None:
    def matched(params: Any, images: jax.Array, texts: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            ends = []
            for x, kernels in zip((images, texts), params, strict=True):
                for kernel in kernels:
                    x = jnp.tanh(x @ kernel)
                ends.append(x)
            return -jnp.mean(jax.nn.log_softmax(ends[0] @ ends[1].T).diagonal())

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    kernels = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 3
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    layers = layers_of(program(matched, [kernels, kernels], x, x))
    ways = side_by_side(len(layers.keys), layers.edges)
    (fork,) = ways
    assert len(fork) == 2 and len(fork[0]) == len(fork[1]) == 3


# -- a number of stages ----------------------------------------------------------------------


def test_a_split_submesh_runs_an_exact_number_of_stages() -> None:
    """The fastest of all ways to cut random layers into segments, as far as they make this number of stages."""
    rng = random.Random(0)
    shape = SubmeshShape("cpu", 1, 2, parts=2)
    found = 0
    for _ in range(20):
        num_layers = rng.randint(3, 6)
        edges = [(u, v) for v in range(1, num_layers) for u in range(v) if v - u == 1 and rng.random() < 0.4]
        edges += [(u, v) for v in range(2, num_layers) for u in range(v - 1) if rng.random() < 0.3]
        seconds = [rng.random() for _ in range(num_layers)]
        problem = PartitionProblem(
            num_layers=num_layers,
            cluster=Cluster((DeviceGroup("cpu", 1, 2),)),
            cost=lambda first, last, _, s=seconds: StageCost(forward_s=sum(s[first : last + 1])),
            transfer_s=lambda *_: 0.0,
            objective=objective_named("inference", 1),
            budget_bytes={"cpu": 1.0},
        )
        stage = Stage(0, num_layers - 1, Submesh(shape, 0, 0))

        def branches(number: int | None, problem: Any = problem, edges: Any = edges) -> Branches:
            return Branches(problem, edges, lambda layer, part, same_host: 0.01, num_stages=number)

        free = branches(None)
        known: dict[int, float] = {}
        for cuts in itertools.product([False, True], repeat=num_layers - 1):
            bounds = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), num_layers]
            parts = [free._segment(a, b - 1, shape) for a, b in itertools.pairwise(bounds)]
            segments = [part[1] for part in parts if part is not None]
            busy = [[n for n, layers in enumerate(segment) if layers] for segment in segments]
            joins = sum(len(one) == 1 and one == other for one, other in itertools.pairwise(busy))
            number = sum(map(len, busy)) - joins
            known[number] = min(known.get(number, math.inf), sum(part[0] for part in parts if part is not None))
        for number in range(1, 2 * num_layers + 2):
            exact = branches(number)
            cost = exact.cost(0, num_layers - 1, shape)
            assert (cost is not None) == (number in known)
            if cost is not None:
                found += 1
                assert len(exact.forked_stages([stage]).place_of) == number
                spans = [[layer for layers in segment for layer in layers] for segment in exact.segments(stage)]
                parts = [exact._segment(min(span), max(span), shape) for span in spans]
                made = sum(part[0] for part in parts if part is not None)
                assert made == pytest.approx(known[number])
    assert found > 40


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 6])
def test_a_number_of_stages_may_be_branches(number: int) -> None:
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    found = autopar.plan(step, *shapes, num_devices=4, **OPTIONS | {"stages": number})
    assert len(found.stages) == number and found.side_by_side() and not found.is_chain
    assert "not bounded" in str(autopar.explain(found)), "not all divisions of the stages are searched"
    chains = [one.step_time_s for one in found.tried if one.schedule not in NAMES.values()]
    assert found.prediction.step_time_s < min(chains, default=math.inf)
    assert chains, "a chain of six has two stages on each of three devices"
    branched = on_devices(found)
    state, loss = branched(branched.init(create, jax.random.key(0), x=batch_of(0)), batch_of(0))
    expected, expected_loss = jax.jit(step)(create(jax.random.key(0)), batch_of(0))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_pins_and_a_mesh_hold_in_branches() -> None:
    """Each branch has the mesh, on a part of a submesh that is larger; an evaluation finds the towers where they are."""
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    options = OPTIONS | {"stages": 4, "mesh": "tp=2", "num_devices": 8, "pin": {"params/towers/*": P(None, "tp")}}
    found = autopar.plan(step, *shapes, **options)
    assert found.side_by_side() and {stage.plan.mesh.describe() for stage in found.stages} == {"2 (tp=2)"}
    branched = autopar.parallelize(plan=found)(step)
    state = branched.init(create, jax.random.key(0), x=batch_of(0))
    specs = {str(kernel.sharding.spec) for tower in state["towers"] for kernel in tower}
    assert specs == {"P(None, 'tp')"}

    def ends(params: Any, x: jax.Array) -> jax.Array:
        shared = jnp.tanh(x @ params["stem"])
        return sum(jnp.tanh(jnp.tanh(shared @ one) @ other) for one, other in params["towers"]) @ params["head"]

    evaluate = autopar.parallelize(like=found, cache=False)(ends)
    made = evaluate(state, batch_of(0))
    np.testing.assert_allclose(made, jax.jit(ends)(create(jax.random.key(0)), batch_of(0)), rtol=1e-4, atol=1e-5)
    like: Any = evaluate.latest_plan
    assert like.side_by_side() == found.side_by_side()


def test_more_stages_than_devices_are_refused_without_branches() -> None:
    kernels = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((32, 512), jnp.float32)
    with pytest.raises(ClusterError, match="3 stages were requested, and 2 devices can have at most 2"):
        autopar.plan(tanh_layers, kernels, x, num_devices=2, **OPTIONS | {"stages": 3})


# -- plans -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_of_branches_says_which_run_side_by_side() -> None:
    text = str(autopar.explain(plan()))
    (fork,) = plan().side_by_side()
    assert f"stages {' | '.join(', '.join(map(str, branch)) for branch in fork)}" in text
    assert "branches side by side" in text and "Timeline of a step, simulated" in text and "submesh 3" in text
    assert all(f"to {one.target}: " in text for one in plan().sends if one.num_bytes)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
def test_a_saved_plan_of_branches_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "branches.plan.json"
    plan().save(path)
    again: Any = autopar.load_plan(path)
    assert again == plan() and again.tasks() == plan().tasks()
    assert again.tasks().needs == plan().tasks().needs


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda p: p["sends"][0].update(target=99), "sends"),
        (lambda p: p["sends"].append(p["sends"][0]), "sends"),
        (lambda p: p.update(schedule="1f1b"), "stages"),
        (lambda p: p["run_layers"].pop(), "run_layers"),
        (lambda p: p.update(run_layers=[0] * len(p["run_layers"])), "starts"),
        (lambda p: p["starts"].reverse(), "starts"),
        (lambda p: p["stages"][0]["submesh"]["shape"].update(devices_per_host=2), "stages[0].plan.mesh"),
    ],
)
def test_a_damaged_plan_of_branches_names_the_field(change: Any, field: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(plan().to_json()))
    change(document)
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(PlanFileError) as caught:
        autopar.load_plan(tmp_path / "p.json")
    assert f"`{field}`" in str(caught.value)


# -- running ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_branches_give_the_steps_numbers() -> None:
    branched, reference = on_devices(plan()), jax.jit(step)
    state = branched.init(create, jax.random.key(0), x=batch_of(0))
    expected = jax.jit(create)(jax.random.key(0))
    for seed in range(2):
        state, loss = branched(state, batch_of(seed))
        expected, expected_loss = reference(expected, batch_of(seed))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    homes = {next(iter(kernel.sharding.device_set)).id for tower in state["towers"] for kernel in tower}
    assert len(homes) == 4, "each tower's parameters are where it runs"


@pytest.mark.slow
def test_branches_of_a_step_without_a_backward_pass() -> None:
    def ends_of(params: Any, x: jax.Array) -> jax.Array:
        shared = jnp.tanh(x @ params["stem"])
        return sum(jnp.tanh(jnp.tanh(shared @ one) @ other) for one, other in params["towers"]) @ params["head"]

    args = create(jax.random.key(0)), batch_of(0)
    found = autopar.plan(ends_of, *args, num_devices=4, **OPTIONS)
    assert isinstance(found, autopar.PipelinePlan) and found.schedule == NAMES["none"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("device",))
    made = autopar.parallelize(plan=found, mesh=mesh)(ends_of)(*args)
    np.testing.assert_allclose(made, jax.jit(ends_of)(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_the_stages_of_branches_are_compiled() -> None:
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    told: Any = autopar.verify(step, *shapes, plan=plan())
    assert len(told.stages) == len(plan().stages) and told.fits
