"""Chimera and DualPipe run: stages on two submeshes each, whose replicas stay equal bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_step import WIDTH, arguments
from dense_step import step as dense
from pipelines import assert_alike, pipelined, tanh_layers
from several_processes import run as run_processes
from test_pipeline_run import check_mlp, mlp_batch, mlp_state, mlp_step
from test_verify_pieces import executed, on_types

import autopar
from autopar.cli.main import main
from autopar.errors import BudgetError, EffectError, PlanFileError, ScheduleError
from autopar.extend.schedules import CHIMERA, PipelineShape, ScheduleKind, Task, both_ways
from autopar.pipeline.cut.replicas import accumulators
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.instructions import Call, Move
from autopar.pipeline.run.stacked_leaves import StackedLeaf, as_arrays
from autopar.report.explain_stages import explain_stages
from autopar.runtime.own_arrays import make_own
from benchmarks.pipeline.models import MODELS, Case, errors

TOLERANCE = 1e-5


def assert_equal_replicas(tree: Any) -> int:
    """Each shard has the same bits on every device that holds it. Returns the number of arrays on several submeshes."""
    several = 0
    for leaf in jax.tree.leaves(tree):
        for array in leaf.parts.values() if isinstance(leaf, StackedLeaf) else [leaf]:
            raw = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
            known: dict[str, bytes] = {}
            for shard in raw.addressable_shards:
                bits = np.asarray(shard.data).tobytes()
                assert known.setdefault(str(shard.index), bits) == bits
            several += len(raw.sharding.device_set) > len(known)
    return several


# -- the executor ------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_microbatches", "mesh"),
    [
        ("chimera", 2, 2, "4"),
        ("chimera", 2, 4, "2x2"),
        ("chimera", 4, 4, "2"),
        ("chimera", 4, 2, "2"),  # fewer microbatches than submeshes
        ("chimera", 8, 16, "1"),
        ("dualpipe", 2, 4, "4"),
        ("dualpipe", 4, 8, "2"),
    ],
)
def test_the_steps_numbers(schedule: str, num_stages: int, num_microbatches: int, mesh: str) -> None:
    check_mlp(schedule=schedule, num_stages=num_stages, num_microbatches=num_microbatches, mesh=mesh)


def test_an_odd_number_of_microbatches() -> None:
    """One replica has one more of them than the other."""
    state = [jnp.eye(8), jnp.ones((8, 8)) / 8]
    step = lambda params, x: tanh_layers(params, x)  # noqa: E731
    assert_alike(
        step, state, lambda seed: jax.random.normal(jax.random.key(seed), (6, 8)),
        schedule="chimera", num_stages=2, num_microbatches=3,
    )  # fmt: skip


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("chimera", 4), ("dualpipe", 8)])
def test_tasks_run_in_the_simulators_order_and_each_accumulator_is_exchanged_once(
    schedule: str, num_microbatches: int
) -> None:
    args = (mlp_state(4), mlp_batch(0))
    _, pipeline = pipelined(
        mlp_step, args, num_stages=2, num_microbatches=num_microbatches, schedule=schedule, mesh="4"
    )
    steps, instances = pipeline.instructions.steps, pipeline.instances
    for submesh, order in enumerate(pipeline.schedule.orders):
        own = [
            one.task for one in steps if isinstance(one, Call) and one.task and instances.submesh(one.stage) == submesh
        ]
        keys = [task for task in order if task.phase in pipeline.pieces[task.stage].pieces.each]
        assert own == keys
    stage_of = pipeline.instructions.stage_of
    between = [
        (stage_of[one.reads[0]], stage_of[one.writes[0]])
        for one in steps
        if isinstance(one, Move)
        and instances.replica(stage_of[one.reads[0]]) != instances.replica(stage_of[one.writes[0]])
    ]
    for s in range(2):
        here, there = instances.of(s)
        accumulators = len(pipeline.pieces[s].accumulators)
        assert accumulators >= 4  # kernels and biases of two layers
        assert between.count((here, there)) == between.count((there, here)) == accumulators
    assert len(between) == 2 * sum(len(one.accumulators) for one in pipeline.pieces[:2])


def test_replicas_are_equal_after_twenty_steps_and_are_not_copied() -> None:
    run, pipeline = pipelined(
        mlp_step, (mlp_state(), mlp_batch(0)), num_stages=2, num_microbatches=4, schedule="chimera", mesh="2x2"
    )
    state: Any = mlp_state()
    for seed in range(20):
        state, _ = run(state, mlp_batch(seed))
    assert assert_equal_replicas(state) == len(jax.tree.leaves(state))
    leaves = jax.tree.leaves((state, mlp_batch(0)))
    make_own(leaves)
    values = pipeline.begin(leaves)
    for leaf, uses in pipeline.arguments.uses.items():
        if leaf in pipeline.arguments.donated:
            given = {shard.data.unsafe_buffer_pointer() for shard in leaves[leaf[0]].addressable_shards}
            for one in uses[:1] + [use for use in uses if use.is_replica]:
                taken = {shard.data.unsafe_buffer_pointer() for shard in values[one.register].addressable_shards}
                assert taken <= given
    wanted = pipeline.in_shardings
    for position, array in enumerate(jax.tree.leaves(state)):
        assert array.sharding.is_equivalent_to(wanted[position], array.ndim)
        assert len(array.sharding.device_set) == 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["max", "min", "sum", "count", "any"])
def test_what_microbatches_accumulate_is_combined_by_its_own_operation(kind: str) -> None:
    reduced = {
        "max": lambda h: jnp.max(h, axis=0),
        "min": lambda h: jnp.min(h),
        "sum": lambda h: jnp.sum(h.astype(jnp.bfloat16), axis=0),
        "count": lambda h: jnp.sum(h > 0, dtype=jnp.int32),
        "any": lambda h: jnp.any(h > 1.5, axis=0),
    }[kind]

    def step(params: list[jax.Array], x: jax.Array) -> Any:
        new, loss = tanh_layers(params, x)
        return new, (loss, reduced(x), reduced(jnp.tanh(x @ params[0])))

    state = [jnp.eye(8), jnp.ones((8, 8)) / 8, jnp.eye(8), jnp.eye(8)]
    assert_alike(
        step, state, lambda seed: jax.random.normal(jax.random.key(seed), (8, 8)),
        schedule="chimera", num_stages=4, num_microbatches=4, tolerance=1e-2 if kind == "sum" else TOLERANCE,
    )  # fmt: skip


def test_rows_of_each_microbatch_come_from_both_replicas() -> None:
    """Predictions, and norms of the first activations: in the order of the examples."""

    def step(params: list[jax.Array], x: jax.Array) -> Any:
        new, loss = tanh_layers(params, x)
        h = jnp.tanh(x @ params[0])
        return new, (loss, jnp.linalg.norm(h, axis=1), jnp.tanh(h @ params[1])[:, :3])

    state = [jnp.eye(8), jnp.ones((8, 8)) / 8, jnp.eye(8), jnp.eye(8)]
    assert_alike(
        step, state, lambda seed: jax.random.normal(jax.random.key(seed), (12, 8)),
        schedule="dualpipe", num_stages=2, num_microbatches=4,
    )  # fmt: skip


@pytest.mark.slow
def test_a_state_with_more_than_floats() -> None:
    """Keys, counters, dropout, a tied table, an argument that is returned, an empty array, and one that is not read."""

    def step(state: dict[str, Any], batch: jax.Array) -> Any:
        def loss(params: dict[str, Any]) -> jax.Array:
            h = params["table"][batch]
            for kernel in params["kernels"]:
                h = jnp.tanh(h @ kernel)
            keep = jax.random.bernoulli(jax.random.fold_in(state["key"], 7), 0.8, h.shape)
            logits = (h * keep) @ params["table"].T
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, None], axis=1))

        value, gradients = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
        new = state | {"params": params, "count": state["count"] + 1, "key": jax.random.split(state["key"])[0]}
        return new, (value, state["never"], 3)

    keys = jax.random.split(jax.random.key(1), 5)
    state = {
        "params": {
            "table": 0.3 * jax.random.normal(keys[0], (12, 8)),
            "kernels": [0.5 * jax.random.normal(key, (8, 8)) for key in keys[1:]],
        },
        "key": jax.random.key(3),
        "count": jnp.int32(0),
        "never": jnp.ones((3, 5)),
        "empty": jnp.zeros((0, 4)),
    }
    pipeline = assert_alike(
        step, state, lambda seed: jax.random.randint(jax.random.key(seed), (8,), 0, 12),
        schedule="chimera", num_stages=2, num_microbatches=4, steps=3,
    )  # fmt: skip
    assert len(pipeline.pieces) == 4


# -- planned by autopar ------------------------------------------------------------------------


def in_replicas(**options: Any) -> dict[str, Any]:
    return {"stages": 4, "num_microbatches": 4, "schedule": "chimera", "hardware": "cpu-host"} | options


def same_numbers(step: Callable[..., Any], other: Callable[..., Any], steps: int = 3) -> tuple[Any, Any]:
    """The state after some steps of both, which have the same losses."""
    here = there = mlp_state()
    for seed in range(steps):
        (here, loss), (there, expected) = step(here, mlp_batch(seed)), other(there, mlp_batch(seed))
        np.testing.assert_allclose(loss, expected, rtol=TOLERANCE)
    for one, two in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(one, two, rtol=TOLERANCE, atol=1e-6)
    return here, there


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_the_decorator_and_the_saved_plan(schedule: str, tmp_path: Path) -> None:
    options = in_replicas(schedule=schedule, num_microbatches=8)
    step = autopar.parallelize(mlp_step, **options)
    state, _ = same_numbers(step, jax.jit(mlp_step))
    assert assert_equal_replicas(state) == len(jax.tree.leaves(state))
    plan = step.latest_plan
    assert isinstance(plan, PipelinePlan) and plan.schedule == schedule
    assert plan.submeshes_of == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert plan.tasks().replicas == plan.submeshes_of
    plan.save(tmp_path / "both.plan.json")
    again = autopar.load_plan(tmp_path / "both.plan.json")
    assert again == plan and again.to_json() == plan.to_json()
    state, other = same_numbers(autopar.parallelize(mlp_step, plan=again), step)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(
        "from test_pipeline_run import mlp_batch, mlp_state, mlp_step\n"
        "def make():\n    return mlp_step, (mlp_state(), mlp_batch(0))\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    how = ["--devices", "8", "--hardware", "cpu-host", "--num-microbatches", "4"]
    plan = ["plan", "train.py:make", *how, "--schedule", "chimera"]
    assert main([*plan, "--stages", "4", "-o", "both.plan.json"]) == 0
    assert main(["explain", "both.plan.json"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "4 stages on 1 + 1 + 1 + 1 devices, each stage on 2 submeshes, chimera, 4 microbatches" in told
    assert "Replicas each stage is on two submeshes with equal state" in told
    assert "0 and 3" in told and "to its replica" in told and "at end" in told
    same_numbers(autopar.parallelize(mlp_step, plan="both.plan.json"), jax.jit(mlp_step), steps=1)
    assert main([*plan, "--stages", "3"]) != 0
    assert "an even number of them; got 3. Take one more or one fewer" in capsys.readouterr().err


def test_memory_and_exchange_are_predicted() -> None:
    """A submesh holds the state of two stages, and a step waits for the accumulators of the other replicas."""
    plan = autopar.plan(mlp_step, mlp_state(), mlp_batch(0), num_devices=4, **in_replicas(stages=2, mesh="2"))
    one_way = autopar.plan(
        mlp_step, mlp_state(), mlp_batch(0), num_devices=4, **in_replicas(stages=2, mesh="2", schedule="1f1b")
    )
    assert isinstance(plan, PipelinePlan) and isinstance(one_way, PipelinePlan)
    states = [stage.cost.state_bytes for stage in plan.stages]
    assert all(size >= sum(states) for size in plan.prediction.stage_bytes)
    assert sum(states) >= 0.9 * sum(stage.cost.state_bytes for stage in one_way.stages)
    assert min(plan.prediction.stage_bytes) > max(stage.cost.state_bytes for stage in one_way.stages)
    exchanged = [one for one in plan.sends if one.source == one.target]
    assert [(one.source, one.when) for one in exchanged] == [(0, "end"), (1, "end")]
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(mlp_state()[0]))
    assert sum(one.num_bytes for one in exchanged) >= parameters
    assert all(
        stage.cost.accumulated_bytes == one.num_bytes / 2 for stage, one in zip(plan.stages, exchanged, strict=True)
    )
    slower = replace(
        plan, sends=tuple(replace(one, seconds=one.seconds + 1) if one in exchanged else one for one in plan.sends)
    )
    # Both stages are on the same two submeshes, so their exchanges share the links between them.
    assert slower.timeline().makespan_s == pytest.approx(plan.prediction.step_time_s + 2, abs=0.1)
    assert all(not one.cost.accumulated_bytes and not one.replicas for one in one_way.stages)
    uses = explain_stages(plan).submeshes
    assert [use.devices for use in uses] == [(0, 1), (2, 3)]
    assert [use.peak_bytes for use in uses] == pytest.approx(plan.prediction.stage_bytes)


def test_damaged_replicas_in_a_file_are_refused() -> None:
    plan = autopar.plan(mlp_step, mlp_state(), mlp_batch(0), num_devices=4, **in_replicas(stages=4))
    assert isinstance(plan, PipelinePlan)

    def refused(message: str, **stage: Any) -> None:
        stages = (replace(plan.stages[0], **stage), *plan.stages[1:])
        with pytest.raises(PlanFileError, match=message):
            PipelinePlan.from_json(replace(plan, stages=stages).to_json())

    (last,) = plan.stages[0].replicas
    refused("must go from stages to others", replicas=())
    refused("submeshes on which 'chimera' runs them", replicas=(plan.stages[1].submesh,))
    refused("must have the shape 1 cpu-host", replicas=(replace(last, shape=replace(last.shape, kind="v100")),))
    refused("goes beyond", replicas=(replace(last, first_device=9),))
    one_way = replace(plan, schedule="1f1b", stages=tuple(replace(one, replicas=()) for one in plan.stages))
    with pytest.raises(PlanFileError, match="must go from stages to others"):
        PipelinePlan.from_json(one_way.to_json())


def trained_layers(state: dict[str, Any], batch: dict[str, Any]) -> Any:
    """A loop over layers, and a counter."""

    def loss(layers: Any) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], layers)
        return jnp.mean((h - batch["x"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["layers"])
    return {"layers": state["layers"] - 0.1 * gradients, "count": state["count"] + 1}, value


def create_layers(key: jax.Array) -> dict[str, Any]:
    return {"layers": 0.4 * jax.random.normal(key, (8, 8, 8)), "count": jnp.int32(0)}


def layers_batch(seed: int) -> dict[str, Any]:
    return {"x": jax.random.normal(jax.random.key(seed), (8, 8))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_stacked_layers_are_built_saved_and_restored(schedule: str, tmp_path: Path) -> None:
    step = autopar.parallelize(trained_layers, **in_replicas(stages=2, schedule=schedule, mesh="2"))
    state = step.init(create_layers, jax.random.key(0), batch=layers_batch(0))
    there = create_layers(jax.random.key(0))
    for seed in range(2):
        state, loss = step(state, layers_batch(seed))
        there, expected = jax.jit(trained_layers)(there, layers_batch(seed))
        assert float(loss) == pytest.approx(float(expected), rel=TOLERANCE)
    assert isinstance(state["layers"], StackedLeaf) and assert_equal_replicas(state) == 3  # two parts and the counter
    np.testing.assert_allclose(np.asarray(state["layers"]), there["layers"], rtol=TOLERANCE, atol=1e-6)
    whole = as_arrays(state)["layers"]
    assert isinstance(whole, jax.Array) and isinstance(whole.sharding, jax.sharding.NamedSharding)
    assert "stage" in whole.sharding.mesh.axis_names  # nothing was gathered
    with autopar.Checkpoints(tmp_path / "kept", step) as checkpoints:
        checkpoints.save(2, state)
        again = checkpoints.restore(create_layers, jax.random.key(0), batch=layers_batch(0))
    np.testing.assert_array_equal(np.asarray(again["layers"]), np.asarray(state["layers"]))
    one_way = autopar.parallelize(trained_layers, **in_replicas(stages=2, schedule="1f1b"))
    other = autopar.Checkpoints(tmp_path / "kept", one_way).restore(
        create_layers, jax.random.key(0), batch=layers_batch(0)
    )
    losses = [float(a(b, layers_batch(5))[1]) for a, b in ((step, again), (one_way, other), (step, state))]
    assert losses == pytest.approx([losses[0]] * 3, rel=TOLERANCE)


def test_an_evaluation_reads_the_state_where_it_is() -> None:
    step = autopar.parallelize(trained_layers, **in_replicas(stages=2, mesh="2", cache=False))
    state, _ = step(create_layers(jax.random.key(0)), layers_batch(0))

    def evaluation(state: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], state["layers"])
        return jnp.mean((h - batch["x"]) ** 2)

    beside = autopar.parallelize(evaluation, like=step, cache=False)
    whole = {name: jnp.asarray(np.asarray(leaf)) for name, leaf in state.items()}
    found, expected = beside(state, layers_batch(1)), jax.jit(evaluation)(whole, layers_batch(1))
    assert float(found) == pytest.approx(float(expected), rel=TOLERANCE)
    assert isinstance(beside.latest_plan, PipelinePlan) and beside.latest_plan.schedule == "inference"
    step(state, layers_batch(1))  # which the evaluation has not consumed


@pytest.mark.slow
def test_a_measured_step_has_each_task() -> None:
    step = autopar.parallelize(mlp_step, **in_replicas())
    state, _ = step(mlp_state(), mlp_batch(0))
    state, loss = step.measured(state, mlp_batch(1))
    plain, _ = jax.jit(mlp_step)(mlp_state(), mlp_batch(0))
    assert float(loss) == pytest.approx(float(jax.jit(mlp_step)(plain, mlp_batch(1))[1]), rel=TOLERANCE)
    for seed in range(6):
        state, _ = step(state, mlp_batch(seed))
    plan, timeline = step.latest_plan, step.report().measured
    assert isinstance(plan, PipelinePlan) and timeline is not None
    schedule = plan.tasks()
    assert {(span.task, span.submesh) for span in timeline.spans if span.task.phase != "update"} == {
        (task, submesh) for task, submesh in schedule.submesh_of().items() if task.phase != "update"
    }
    updates = {(span.task.stage, span.submesh) for span in timeline.spans if span.task.phase == "update"}
    assert updates == {(s, submesh) for s, places in enumerate(schedule.replicas) for submesh in places}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [WIDTH, 50])  # 50: some values have uneven parts on four devices
def test_pieces_are_those_of_the_executor_on_both_replicas(width: int) -> None:
    args = arguments(width)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "mesh": "4", "schedule": "chimera"}
    run, pipeline = pipelined(dense, args, **options)
    state, loss = run(*args)
    plain, expected = jax.jit(dense)(*args)
    assert loss == pytest.approx(float(expected), rel=TOLERANCE)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=1e-6)
    found, digests = on_types(pipelined(dense, args, **options)[1])
    ran: dict[Any, set[str]] = {}
    for (instance, key), texts in executed(pipeline, args).items():
        ran.setdefault((pipeline.instances.stage(instance), key), set()).update(texts)
    assert digests == ran
    assert {piece.count for piece in found.pieces if piece.phase in ("forward", "backward")} == {4}
    assert {piece.count for piece in found.pieces if piece.phase == "update"} == {2}
    assert found.peak_bytes[0] == pytest.approx(found.peak_bytes[1], rel=0.1)


# -- refused -----------------------------------------------------------------------------------


def test_impossible_requests_are_refused() -> None:
    def planned(step: Callable[..., Any] = mlp_step, **options: Any) -> Any:
        return autopar.plan(step, mlp_state(), mlp_batch(0), **{"num_devices": 8} | in_replicas(**options))

    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"stages": 3}, "even number of them; got 3. Take one more or one fewer, or schedule='1f1b'"),
        ({"num_microbatches": 1}, "at least 2 microbatches, not 1"),
        ({"schedule": "dualpipe"}, "an even number of microbatches, at least 8 on 4 submeshes; got 4"),
    )
    for options, message in wrong:
        with pytest.raises(ScheduleError, match=message):
            planned(**options)

    def printing(state: Any, batch: Any) -> Any:
        new, loss = mlp_step(state, batch)
        jax.debug.print("loss {loss}", loss=loss)
        return new, loss

    with pytest.raises(EffectError, match=r"test_replicas.py:\d+ \(.*printing\) has a side effect once per step"):
        planned(printing)
    mixed: dict[str, Any] = {"hardware": {"a100-sxm-40": 1, "v100-sxm-16": 1}, "num_devices": None, "stages": 2}
    with pytest.raises(BudgetError, match=r"no equal submeshes of 1x1 a100-sxm-40 .* 1x1 v100-sxm-16"):
        planned(**mixed)


def test_microbatches_that_continue_from_one_another_are_refused() -> None:
    """None of autopar's own accumulators does."""
    args = (mlp_state(2), mlp_batch(0))
    _, pipeline = pipelined(mlp_step, args, num_stages=2, num_microbatches=2, mesh="4")
    layout = pipeline.pieces[0].layout
    known = accumulators(layout)
    carry, step = next(iter(known.items()))
    at = layout.trace.equations.index(step)
    other = next(one for one in layout.trace.equations if one.primitive == "dot_general")
    layout.trace = replace(
        layout.trace,
        equations=tuple(
            replace(one, source=other.source) if n == at else one for n, one in enumerate(layout.trace.equations)
        ),
    )
    assert carry in known
    with pytest.raises(ScheduleError, match=r"continues from what `dot_general` at .*test_pipeline_run.py:\d+"):
        accumulators(layout)


def test_entries_whose_replicas_cannot_run_are_refused() -> None:
    def swapped(shape: PipelineShape) -> Any:
        return tuple(reversed(CHIMERA.orders(shape)))

    def mixed(shape: PipelineShape) -> Any:
        """The first stage alone has its microbatches in turn."""
        orders = [[task for task in order if task.stage] for order in CHIMERA.orders(shape)]
        for m in range(shape.num_microbatches):
            orders[m % 2 and -1] += [Task(0, m, "forward"), Task(0, m, "backward")]
        return tuple(map(tuple, orders))

    def planned(orders: Any, **more: Any) -> Any:
        kind = ScheduleKind(name="own", description="Both ways.", orders=orders, placement=both_ways, **more)
        return autopar.plan(mlp_step, mlp_state(), mlp_batch(0), num_devices=8, **in_replicas(schedule=kind))

    with pytest.raises(ScheduleError, match="the first submesh of each stage in its `placement` must run microbatch 0"):
        planned(swapped)
    with pytest.raises(ScheduleError, match=r"deadlocks|divides the microbatches otherwise"):
        planned(mixed)
    plan = planned(CHIMERA.orders, requires=CHIMERA.requires)
    assert plan.schedule == "own" and plan.submeshes_of == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert PipelinePlan.from_json(plan.to_json()) == plan


# -- models ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("GPT-2", Case(2, 4, "chimera", 4)),
        ("GPT-2", Case(4, 8, "dualpipe", 4)),
        ("GPT-2 scanned", Case(4, 4, "chimera", 8)),
        ("GPT-2 scanned", Case(2, 4, "dualpipe", 4)),
        ("BART", Case(2, 2, "chimera", 4)),
        ("BART", Case(4, 4, "chimera", 8)),
    ],
)
def test_models(name: str, case: Case) -> None:
    losses, parameters, step = errors(MODELS[name](), case)
    assert len(step.latest_plan.stages) == case.stages and step.latest_plan.schedule == case.schedule
    assert losses < TOLERANCE and parameters < TOLERANCE


@pytest.mark.slow
def test_several_processes() -> None:
    """A replica of each stage in each process; a pair of submeshes in each; a submesh in each."""
    for cases, processes, devices in (
        (["2 2 chimera", "4 1 chimera", "2 2 dualpipe"], 2, 2),
        (["4 1 chimera"], 4, 1),
    ):
        ended = run_processes("pipelined", *cases, processes=processes, devices=devices)
        assert [one.code for one in ended] == [0] * processes, ended[-1].errors[-3000:]
        for one in ended:
            for case, told in one.last.items():
                assert told["losses"] == pytest.approx(told["expected"], rel=TOLERANCE), case
                assert told["shards"] and told["off"] <= 1, case


@pytest.mark.slow
def test_state_of_several_processes_is_fed_saved_and_restored(tmp_path: Path) -> None:
    """Each process has a replica of each stage; also restored with a stage in each."""
    for program in ("replicas_kept", "stacked_replicas"):
        ended = run_processes(program, str(tmp_path / program), processes=2, devices=1)
        assert [one.code for one in ended] == [0, 0], ended[-1].errors[-3000:]
        for one in ended:
            assert one.last["losses"] == pytest.approx(one.last["expected"], rel=TOLERANCE), program
    (mixer, other) = run_processes("mixer_in_stages", "chimera", processes=2, devices=1)
    assert mixer.last["losses"] == other.last["losses"] == pytest.approx(mixer.last["expected"], rel=TOLERANCE)
    assert mixer.last["off"] == other.last["off"] < TOLERANCE
    assert mixer.last["held"] == other.last["held"] == mixer.last["all"], "each process has all"
