"""Pipelines side by side give the results of the step as written, whatever their sizes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from several_processes import run

import autopar
from autopar.api.elastic.side_by_side import _profile
from autopar.errors import MeshError, MicrobatchError, OptionError, ScheduleError, StepSignatureError
from autopar.hardware.profile import load
from autopar.runtime.distributed.box_exchange import BoxExchange, Moved, box_of
from autopar.runtime.distributed.routes import Held, Router, rounds_of
from benchmarks.faults.fsdp import layers_as_written
from benchmarks.faults.kept_job import KeptJob, losses, segments
from benchmarks.faults.survival import worst_difference

PROGRAMS = Path(__file__).parent / "side_by_side_programs.py"
BATCH, WIDTH, LAYERS = 24, 16, 6


def hardware(devices_per_node: int) -> Any:
    return replace(load("cpu-host"), devices_per_host=devices_per_node, nvlink_domain_devices=None)


def mesh_of(devices: Any, *sizes: int) -> Mesh:
    names = tuple("abcd"[: len(sizes)])
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def create(rng: jax.Array) -> Any:
    rngs = jax.random.split(rng, LAYERS + 1)
    params = {
        "layers": jax.random.normal(rngs[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        "last": jnp.ones((WIDTH,)),
    }
    return {"params": params, "moments": optimizer.init(params), "rng": jax.random.key(7)}


def scanned(state: Any, batch: Any) -> Any:
    """Scanned layers, dropout, a mean over marked examples, and a global norm."""
    rng, drop = jax.random.split(state["rng"])
    kept = jax.random.bernoulli(drop, 0.8, batch["x"].shape)

    def loss_of(params: Any) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"] * kept, params["layers"])
        each = jnp.mean((hidden * params["last"] - batch["y"]) ** 2, 1) * batch["mask"]
        return jnp.sum(each) / jnp.sum(batch["mask"])

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, moments = optimizer.update(grads, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "moments": moments, "rng": rng}, {"loss": loss, "norm": optax.tree.norm(grads)}


def create_tied(rng: jax.Array) -> Any:
    rngs = jax.random.split(rng, LAYERS)
    layers = [jax.random.normal(one, (WIDTH, WIDTH)) / WIDTH**0.5 for one in rngs]
    return {"layers": layers, "table": jnp.ones((WIDTH, WIDTH)) / WIDTH}


def tied(state: Any, batch: Any) -> Any:
    """Layers that differ, and a matrix that the first and the last of them share."""

    def loss_of(params: Any) -> jax.Array:
        x = batch["x"] @ params["table"]
        for n, w in enumerate(params["layers"]):
            x = jnp.tanh(x @ w) if n % 2 else x + jax.nn.gelu(x @ w)
        return jnp.mean((x @ params["table"].T - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), {"loss": loss, "norm": optax.tree.norm(grads)}


def batches(count: int) -> Any:
    for number in range(count):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.roll(x, 1, 1), "mask": (rng.random(BATCH) < 0.6).astype(np.float32)}


def check(function: Any, creates: Any, steps: int = 3, **options: Any) -> Any:
    """Run steps in pipelines, and compare with one device. Returns the pipelines."""
    batch = next(batches(1))
    if function is not scanned:
        batch = {name: batch[name] for name in "xy"}
    step = autopar.parallelize(function, cache=False, **options)
    state = step.init(
        creates, jax.random.key(0), batch=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    )
    expected, jitted = creates(jax.random.key(0)), jax.jit(function)
    for number, given in enumerate(batches(steps)):
        given = {name: given[name] for name in batch}
        expected, wanted = jitted(expected, given)
        state, made = step(state, step.shard_batch(given) if number % 2 else given)
        assert float(made["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
        assert float(made["norm"]) == pytest.approx(float(wanted["norm"]), rel=1e-4)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-6)
    assert step.pipelines is not None
    return step


def test_two_pipelines_of_two_stages() -> None:
    def two_layers(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(batch["x"] @ params["first"]) @ params["last"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), {"loss": loss, "norm": optax.tree.norm(grads)}

    def creates(rng: jax.Array) -> Any:
        return {"first": jax.random.normal(rng, (WIDTH, WIDTH)), "last": jnp.ones((WIDTH, WIDTH)) / WIDTH}

    step = check(two_layers, creates, pipelines=2, stages=2, num_microbatches=3, hardware=hardware(4))
    assert [len(nodes) for nodes in step.pipelines.pipelines] == [1, 1]
    assert sorted(step.pipelines.microbatches) == [1, 2]
    assert "the state is divided over all nodes once" in str(autopar.explain(step.pipelines))


@pytest.mark.slow
def test_pipelines_of_unequal_sizes() -> None:
    """Four nodes and twice two, in two stages each."""
    step = check(scanned, create, pipelines=2, stages=2, num_microbatches=6, hardware=hardware(1))
    assert [len(nodes) for nodes in step.pipelines.pipelines] == [4, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "creates", "options"),
    [
        (scanned, create, {"pipelines": 1, "stages": 3, "num_microbatches": 4}),
        (scanned, create, {"pipelines": 4, "num_microbatches": 12}),
        (scanned, create, {"pipelines": 2, "stages": 3, "num_microbatches": 4, "hardware": hardware(1)}),
        (tied, create_tied, {"pipelines": 2, "stages": 2, "num_microbatches": 8, "hardware": hardware(2)}),
        (
            tied,
            create_tied,
            {"pipelines": 3, "stages": 2, "num_microbatches": 6, "schedule": "gpipe", "hardware": hardware(1)},
        ),
        (
            tied,
            create_tied,
            {"pipelines": 2, "stages": 2, "num_microbatches": 6, "schedule": "zb-h1", "hardware": hardware(1)},
        ),
    ],
)
def test_other_sizes_steps_and_schedules(function: Any, creates: Any, options: Any) -> None:
    check(function, creates, **{"hardware": hardware(1), **options})


def test_values_get_other_devices_and_sources_are_added_up() -> None:
    devices = jax.devices()
    two, three = mesh_of(devices[:2], 2), mesh_of(devices[2:5], 3)
    everywhere = mesh_of(devices, 2, 4)
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(6, 8)).astype(np.float32)
    one = jax.device_put(whole, NamedSharding(two, PartitionSpec(None, "a")))
    rows = [jax.device_put(whole[:4], NamedSharding(two, PartitionSpec("a"))), jax.device_put(whole[4:], devices[1])]
    other = jax.device_put(2 * whole, NamedSharding(three, PartitionSpec("a")))
    flags, small = np.arange(24) % 3 == 0, jnp.bfloat16(1.5)
    flagged = jax.device_put(flags, NamedSharding(three, PartitionSpec()))
    scalar = jax.device_put(small, NamedSharding(two, PartitionSpec()))
    empty = jax.device_put(np.zeros((0, 3), np.int8), NamedSharding(two, PartitionSpec()))
    single = NamedSharding(mesh_of(devices[1:2], 1), PartitionSpec())
    last = jax.device_put(whole[4:], single)
    box = box_of(whole.shape)
    parts = ((rows[0].sharding, ((0, 4), (0, 8))), (single, ((4, 6), (0, 8))))
    columns = NamedSharding(everywhere, PartitionSpec(None, ("a", "b")))
    exchange = BoxExchange(
        devices,
        [
            Moved(
                (6, 8),
                np.float32,
                (((one.sharding, box),), ((other.sharding, box),), parts),
                (columns, box),
                jax.lax.add,
            ),
            Moved(
                (6, 8),
                np.float32,
                (((other.sharding, box),),),
                (NamedSharding(two, PartitionSpec("a")), ((2, 6), (0, 8))),
            ),
            Moved(
                (24,),
                bool,
                (((flagged.sharding, box_of((24,))),),),
                (NamedSharding(everywhere, PartitionSpec("b")), box_of((24,))),
            ),
            Moved((), scalar.dtype, (((scalar.sharding, ()),),), (NamedSharding(three, PartitionSpec()), ())),
            Moved(
                (0, 3),
                np.int8,
                (((empty.sharding, box_of((0, 3))),),),
                (NamedSharding(three, PartitionSpec()), box_of((0, 3))),
            ),
        ],
    )
    made = exchange([[[one], [other], [rows[0], last]], [[other]], [[flagged]], [[scalar]], [[empty]]])
    np.testing.assert_array_equal(made[0], whole + 2 * whole + whole)
    np.testing.assert_array_equal(made[1], 2 * whole[2:6])
    np.testing.assert_array_equal(made[2], flags)
    assert float(made[3]) == 1.5 and made[4].shape == (0, 3)
    assert made[0].sharding == columns and made[1].sharding.device_set == set(devices[:2])


def test_a_device_keeps_what_it_has_and_others_send_equally() -> None:
    router = Router([0, 0, 1, 1])
    whole = ((0, 4),)
    held = [Held(n, whole) for n in range(3)]
    pieces = router.pieces(0, 0, held, {0: whole, 3: ((1, 3),)}, 4)
    assert [(one.held.device, one.target, one.size) for one in pieces] == [(0, 0, 4), (2, 3, 2)]
    messages = [(0, 1, (), 8), (0, 2, (), 9), (1, 2, (), 3), (2, 0, (), 9), (1, 0, (), 1)]
    rounds = rounds_of(messages)
    assert sum(map(len, rounds)) == len(messages)
    for one in rounds:
        assert len({m[0] for m in one}) == len({m[1] for m in one}) == len(one)


def test_what_does_not_run_side_by_side_is_refused() -> None:
    for options, text in (
        ({"pipelines": 0, "num_microbatches": 4}, "give a number of pipelines, 1 or more"),
        ({"pipelines": 2}, "need a microbatch each, and `num_microbatches` is None"),
        ({"pipelines": 2, "num_microbatches": 1}, "`num_microbatches` is 1: give at least 2"),
        ({"pipelines": 2, "num_microbatches": 4, "mesh": "4x2"}, "`mesh` does not go with `pipelines`"),
    ):
        with pytest.raises(OptionError, match=text):
            autopar.parallelize(scanned, **options)
    with pytest.raises(OptionError, match="`plan` has the stages already, and `pipelines` plans some"):
        autopar.parallelize(scanned, plan="plan.json", pipelines=2, num_microbatches=4)

    def each(state: Any, batch: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["last"])
        return {"last": state["last"] - 0.1 * grad}, batch["x"] @ state["last"]

    step = autopar.parallelize(each, cache=False, pipelines=2, num_microbatches=4, hardware=hardware(1))
    with pytest.raises(MicrobatchError, match="returns a value for each example"):
        step.init(lambda rng: {"last": jnp.ones((WIDTH,))}, jax.random.key(0), batch={"x": jnp.ones((BATCH, WIDTH))})


@pytest.mark.parametrize(("schedule", "text"), [("chimera", "are on two submeshes each"), ("pipedream", "do not wait")])
def test_schedules_of_other_kinds_are_refused(schedule: str, text: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{schedule}' does not go with `pipelines`: its stages {text}"):
        autopar.parallelize(scanned, pipelines=2, num_microbatches=8, schedule=schedule)


def test_nodes_are_equal() -> None:
    devices = jax.devices()
    assert _profile(hardware(3), devices[:6]).devices_per_host == 3
    with pytest.raises(MeshError, match="8 devices are not whole nodes of 3"):
        _profile(hardware(3), devices)


@pytest.mark.slow
def test_a_report_says_where_the_times_are() -> None:
    step = check(scanned, create, steps=6, pipelines=2, stages=2, num_microbatches=4, hardware=hardware(2))
    with pytest.raises(StepSignatureError, match=r"`autopar.explain` of its `pipelines` has the predicted times"):
        step.report()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "sizes"), [(5, 1, [3, 2]), (4, 2, [1, 1, 1, 1]), (2, 1, [2])])
def test_several_processes(processes: int, devices: int, sizes: list[int]) -> None:
    ended = run("trained", processes=processes, devices=devices, programs=PROGRAMS)
    assert [one.code for one in ended] == [0] * processes, ended[0].errors[-3000:]
    for one in ended:
        assert one.last["losses"] == pytest.approx(one.last["expected"], rel=1e-5)
        assert [len(nodes) for nodes in one.last["pipelines"]] == sizes


@pytest.mark.slow
def test_pipelines_go_on_with_the_nodes_that_remain(tmp_path: Path) -> None:
    """Two pipelines of two nodes; then one of three, and again two."""
    options = ["--timeout", "5", "--every", "7", "--ahead", "0", "--return-after", "1000"]
    with KeptJob(tmp_path, [str(PROGRAMS), "kept", str(tmp_path / "log"), "1000000", "0.1"], *options) as job:
        job.at(20)
        os.kill(job.worker(2)["agent"], signal.SIGKILL)
        job.wait(lambda: any(one["count"] == 3 for one in job.events("step")))
        job.at(job.events("step")[-1]["step"] + 20)
        job.join_another()
        job.wait(lambda: job.events("step")[-1]["count"] == 4)
        job.at(job.events("step")[-1]["step"] + 10)
        job.keeper.send_signal(signal.SIGTERM)
        assert job.ended() == 0, job.text()
        history = losses(job.events("step"))
    assert sorted(history) == list(range(1, max(history) + 1))
    assert [count for count, _, _ in segments(history)] == [4, 3, 4]
    assert worst_difference(history, layers_as_written()) < 1e-5
