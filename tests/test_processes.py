"""Several processes, as a launcher starts them: the same results, and errors and faults by name."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import process_programs
import pytest
from several_processes import Ended, run

import autopar
from autopar import errors
from autopar.ir.mesh import MeshShape, parse_mesh
from autopar.jax_interop.partition_spec import partition_spec
from autopar.runtime import jit as execute
from autopar.runtime.distributed import device_order, process_sentinel
from autopar.runtime.distributed.coordination_store import Service
from autopar.runtime.distributed.exchange import Exchange, Member
from autopar.runtime.distributed.fault_attribution import Judge, Record, step_times
from autopar.runtime.distributed.plan_agreement import with_hosts


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """Losses of one process with eight devices."""
    return process_programs.trained(autopar.parallelize(mesh="2x4")(process_programs.step_of()))


def all_told(ended: list[Ended]) -> list[Any]:
    assert [one.code for one in ended] == [0] * len(ended), "\n---\n".join(one.errors[-2000:] for one in ended)
    return [one.last for one in ended]


# -- the same numbers ------------------------------------------------------------------------


@pytest.mark.contract
def test_two_processes_train_as_one(undisturbed: list[float]) -> None:
    """Whether the plan splits the examples over hosts, inside them, or across."""
    first, second = all_told(run("train", "2x4", "data", "model", "model,data", processes=2, devices=4))
    for losses in first["losses"].values():
        np.testing.assert_allclose(losses, undisturbed, rtol=1e-5)
    assert first == second, "one plan, one result"
    assert first["moved"] == {"data": False, "model": True, "model,data": True}
    assert first["processes"] == [0, 0, 0, 0, 1, 1, 1, 1], "the inner axis stays inside a process"


@pytest.mark.slow
def test_four_processes_train_as_one(undisturbed: list[float]) -> None:
    told = all_told(run("train", "4x2", "data,model", processes=4, devices=2))
    for losses in told[0]["losses"].values():
        np.testing.assert_allclose(losses, undisturbed, rtol=1e-5)
    assert all(one == told[0] for one in told)
    assert told[0]["moved"] == {"data,model": False}
    assert told[0]["processes"] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_one_process_lays_out_its_batch_too() -> None:
    step = autopar.parallelize(mesh="8")(process_programs.step_of())
    step.init(process_programs.create_state, jax.random.key(0), batch=process_programs.BATCH_SHAPES)
    batch = next(process_programs.batches())
    placed = step.shard_batch({**batch, "x": batch["x"].astype(np.float64)})  # which JAX takes for float32
    state = jax.eval_shape(process_programs.create_state, jax.random.key(0))
    planned = {t.path: t.sharding for t in step.plan(state, process_programs.BATCH_SHAPES).inputs}
    assert placed["x"].sharding.spec == partition_spec(planned["batch/x"])
    np.testing.assert_array_equal(placed["x"], batch["x"])
    with pytest.raises(errors.BatchError, match=r"`batch/x` has shape \(8, 64\), and the plan takes \(16, 64\)"):
        step.shard_batch({**batch, "x": batch["x"][:8]})


def test_batches_of_every_kind_of_array_and_pytree() -> None:
    """What loaders give: tensors that NumPy can read, lists for tuples, keys."""

    class Tensor:  # as torch's and TensorFlow's
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.arange(16.0).reshape(16, 1)

    @autopar.parallelize(mesh="8")
    def step(state: jax.Array, batch: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        examples, key = batch
        noise = jax.random.normal(key, examples.shape)
        return state + 1, (examples + noise).sum() - noise.sum()

    shapes = (jax.ShapeDtypeStruct((16, 1), "float32"), jax.eval_shape(jax.random.key, 0))
    state = step.init(lambda: jax.numpy.zeros(()), batch=shapes)
    batch = step.shard_batch([Tensor(), jax.random.key(3)])
    assert isinstance(batch, tuple)
    assert float(step(state, batch)[1]) == pytest.approx(120.0, abs=1e-3)


def test_shard_batch_identifies_an_argument_by_pytree_or_name() -> None:
    @autopar.parallelize(mesh="8")
    def step(state: jax.Array, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state + images.sum() + labels.sum(), (images * labels).sum()

    image = jax.ShapeDtypeStruct((16, 8), "float32")
    step.init(lambda: jax.numpy.zeros(()), images=image, labels=image)
    data = np.ones((16, 8), np.float32)
    with pytest.raises(errors.BatchError, match=r"cannot identify the argument of `.*step`: images, labels fit"):
        step.shard_batch(data)
    assert step.shard_batch(data, argument="labels").shape == (16, 8)
    with pytest.raises(errors.BatchError, match="the argument `label` of"):
        step.shard_batch(data, argument="label")


# -- meshes ----------------------------------------------------------------------------------


class FakeDevice:
    def __init__(self, number: int, process: int, domain: int | None = None) -> None:
        self.id, self.process_index, self.platform = number, process, "gpu"
        if domain is not None:
            self.slice_index = domain


def test_hosts_are_filled_one_after_the_other() -> None:
    """A launcher may deal processes out over the hosts in turn: then neighbours are those of one host, not one number."""
    devices = [FakeDevice(number, process=number, domain=number % 2) for number in range(8)]
    ordered = device_order.in_host_order(devices)
    assert [device.id for device in ordered] == [0, 2, 4, 6, 1, 3, 5, 7]
    mixed = [FakeDevice(number, process=number % 2) for number in range(4)]
    assert [device.process_index for device in device_order.in_host_order(mixed)] == [0, 0, 1, 1]


def test_devices_are_counted_by_the_links_that_join_them() -> None:
    assert device_order.devices_per_domain([FakeDevice(n, process=n, domain=n // 4) for n in range(8)]) == 4
    assert device_order.devices_per_domain(jax.devices()) == 8
    assert with_hosts("h100-sxm").devices_per_host == 8
    assert with_hosts(None).devices_per_host == 8, "of the 64 that the profile allows"


def test_a_mesh_that_is_larger_than_the_cluster_is_refused_with_the_numbers() -> None:
    devices = [FakeDevice(number, process=number // 4) for number in range(8)]
    with pytest.raises(errors.MeshError, match=r"mesh 4x4 .* needs 16 devices, but 8 \(gpu; 2 processes x 4\)"):
        execute.check_devices(parse_mesh("4x4"), devices)


def test_what_is_priced_inside_a_host_stays_inside_one() -> None:
    """The planner's counting of hosts, and the mesh that is made, for every mesh of 8 and hosts of 4 and 2."""
    from dataclasses import replace

    from autopar.cost.collectives import groupings
    from autopar.hardware.profile import load

    for per_host in (2, 4):
        profile = replace(load("h100-sxm"), devices_per_host=per_host)
        devices = [FakeDevice(n, process=n // per_host) for n in range(8)]
        for shape in (
            MeshShape(("a", "b"), (2, 4)),
            MeshShape(("a", "b"), (4, 2)),
            MeshShape(("a", "b", "c"), (2, 2, 2)),
        ):
            grid = np.array(device_order.in_host_order(devices), dtype=object).reshape(shape.axis_sizes)
            hosts = np.vectorize(lambda device: device.process_index)(grid)
            for i, axis in enumerate(shape.axis_names):
                lines = np.moveaxis(hosts, i, -1).reshape(-1, shape.axis_sizes[i])
                (workers,) = groupings((axis,), shape, profile)
                for line in lines:
                    assert len(set(line.tolist())) == workers.num_hosts, (shape, axis, per_host)


# -- mistakes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    ended = run("refused", str(tmp_path_factory.mktemp("plans")), processes=2, devices=2)
    told = all_told(ended)
    assert told[0]["loss"] == told[1]["loss"]
    assert [one["num_devices"] for one in told] == [4, 4], "each process has a part of every array"
    return [one["messages"] for one in told]


HOST = r"\(host \S+\)"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        ("code", "ProcessError", rf"process 1 {HOST}: its program differs: .*on process 0"),
        ("number", "ProcessError", rf"process 1 {HOST}: a constant of its program differs: \S+\.py:\d+"),
        ("option", "ProcessError", rf"process 1 {HOST}: the option mesh is '4', and '2x2' on process 0"),
        (
            "shape",
            "ProcessError",
            rf"process 1 {HOST}: its program differs: input `batch/x`: \S+\[16,64\] on process 0, \S+\[32,64\] there",
        ),
        ("budget", "BudgetError", "memory"),
        ("plan", "ProcessError", rf"process 1 {HOST}: its given plan is another"),
        ("no plan", "StepSignatureError", "has none yet"),
        ("seed", "BatchError", rf"`rng` must be equal on every process.*process 1 {HOST} gave other"),
        ("whole differs", "BatchError", rf"`batch/scale` must be equal on every process.*process 1 {HOST} gave other"),
        ("some shares", "BatchError", rf"`batch/x`: process 0 {HOST} gave the whole, but process 1 {HOST} a share"),
        (
            "uneven",
            "BatchError",
            rf"process 1 {HOST}: `batch/x` has shape \(7, 64\), and the plan takes \(8, 64\), the",
        ),
        ("dtype", "BatchError", r"`batch/y` is int32, and the plan was made for float32"),
        ("no array", "BatchError", "`batch/y` is of type object, which NumPy cannot convert"),
        ("other paths", "BatchError", "got `batch/z`, which are not the paths of any argument"),
        ("host batch", "BatchError", rf"`batch/x` must be equal on every process.*process 1 {HOST} gave other"),
        ("size", "MeshError", r"mesh 2x8 .* needs 16 devices, but 4 \(cpu; 2 processes x 2\) are visible"),
        (
            "idle process",
            "MeshError",
            "the plan uses 2 of 4 devices, and process 1 would have none of them: start 1 process",
        ),
    ],
)
def test_a_mistake_is_refused_on_all_processes(
    refusals: list[dict[str, list[str]]], mistake: str, kind: str, text: str
) -> None:
    for process, messages in enumerate(refusals):
        assert messages[mistake][0] == kind, (process, messages[mistake])
        assert re.search(text, messages[mistake][1], re.DOTALL), (process, messages[mistake][1])


def test_a_process_that_cannot_trace_its_step_stops_the_others(refusals: list[dict[str, list[str]]]) -> None:
    assert re.search(rf"process 1 {HOST} .*KeyError", refusals[0]["untraceable"][1])
    assert "KeyError" in str(refusals[1]["untraceable"])


# -- faults ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_goes_on_after_a_kill_with_the_same_losses(tmp_path: Path, undisturbed: list[float]) -> None:
    """Process 1 dies in mid-epoch; process 0 says so in time and stops; the rest is trained on the same number of
    devices, and on fewer."""
    ended = run("killed", str(tmp_path), "3", "1", processes=2, devices=2)
    assert [one.code for one in ended] == [1, -9]
    assert re.search(
        rf"ProcessError: process 1 {HOST} has given no sign of life for \d+ s, since call", ended[0].errors
    )
    assert 8 < ended[0].last["after_s"] < 90, "about what was asked for; by itself JAX takes 100 s"
    np.testing.assert_allclose([loss for _, loss in ended[0].told[:3]], undisturbed[:3], rtol=1e-5)
    half = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    on_fewer = process_programs.rest_of(str(tmp_path), half)
    for one in (on_fewer, *all_told(run("resumed", str(tmp_path), "4", processes=2, devices=2))):
        assert one["from"] == 3
        np.testing.assert_allclose(one["losses"], undisturbed[3:], rtol=1e-5)


@pytest.mark.slow
def test_when_process_0_dies_jax_ends_the_others_and_it_is_named(tmp_path: Path) -> None:
    ended = run("killed", str(tmp_path), "3", "0", processes=2, devices=2)
    assert ended[0].code == -9 and ended[1].code not in (0, None)
    assert re.search(rf"autopar: process 0 {HOST}.* has died: nothing answers at 127.0.0.1", ended[1].errors)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "devices"), [("whole", 2), ("stages", 1)])
def test_a_process_that_hangs_is_named_with_its_line(how: str, devices: int) -> None:
    for one in run("hangs", how, processes=2, devices=devices):
        assert one.code == 1
        assert re.search(
            rf"process 1 {HOST} hangs at process_programs.py:\d+ \(read_for_ever\).* called its step 3 times",
            one.errors,
        ), one.errors[-2000:]


@pytest.mark.slow
def test_a_process_that_dies_is_named_by_those_of_other_stages() -> None:
    ended = run("dies", "stages", "1", processes=2, devices=1)
    assert [one.code for one in ended] == [1, -9]
    assert re.search(rf"ProcessError: process 1 {HOST} has given no sign of life for \d+ s", ended[0].errors)


@pytest.mark.slow
def test_a_frozen_process_0_is_named_in_time() -> None:
    (other, _) = run("frozen", processes=2, devices=2, frozen=0)
    assert other.code == 1
    assert re.search(rf"process 0 {HOST}, which all others report to, has not answered for \d+ s", other.errors)
    assert "stopped sending heartbeats" not in other.errors and "Heartbeat" not in other.errors, "JAX takes 100 s"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "devices", "slow"), [("whole", 2, 1), ("stages", 1, 0)])
def test_a_straggler_is_named_and_a_process_that_fails_by_itself(how: str, devices: int, slow: int) -> None:
    ended = run("straggles", how, str(slow), processes=2, devices=devices, limit_s=100.0)  # by itself JAX takes so long
    for one in ended:
        (first, factor, late_s, step_s), (_, _, other_late_s, _) = one.last["times"]
        assert first == slow and factor > 1.5 and late_s > 0.28 and step_s > 0.28 and other_late_s < late_s
        assert len(one.last["stragglers"]) == 1 and f"process {slow}" in one.last["stragglers"][0]
        assert one.code not in (0, None)
    failed, met = ended[slow], ended[1 - slow]
    assert re.search(rf"process {slow} {HOST} failed in call 3 of its step: KeyError: 'no such file'", met.errors)
    assert "KeyError: 'no such file'" in failed.errors


# -- what processes tell each other, without processes ---------------------------------------


class Store:
    """As much of JAX's client as is used, for threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool) -> None:
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: no key")
            return self.values[key]

    def key_value_increment(self, key: str, increment: int) -> int:
        with self.changed:
            self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + increment)
            return int(self.values[key])

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            for known in [k for k in self.values if k.startswith(key)]:
                del self.values[known]


def at_once(*programs: Callable[[Exchange], Any], wait_s: float = 60.0) -> list[Any]:
    """What each process's program returns, or the error it ends with."""
    store = Store()
    exchanges = [Exchange(Service(store, i, len(programs)), wait_s) for i in range(len(programs))]

    def ended(program: Callable[[Exchange], Any], exchange: Exchange) -> Any:
        try:
            return program(exchange)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(ended, programs, exchanges))


def test_every_process_gets_the_same_answer() -> None:
    def add(exchange: Exchange) -> int:
        return exchange.judged("adding", exchange.index + 1, lambda given: sum(one.value for one in given))

    def twice(exchange: Exchange) -> list[int]:
        return [add(exchange), add(exchange)]

    assert at_once(twice, twice, twice) == [[6, 6]] * 3


def test_a_large_value_arrives_whole() -> None:
    noise = np.random.default_rng(0).bytes(3 << 20).hex()
    told = at_once(*[lambda exchange: exchange.made_once("noise", lambda: noise)] * 2)
    assert told == [noise, noise]


def test_a_process_that_does_not_come_is_named_to_those_that_did() -> None:
    told = at_once(*[lambda exchange: exchange.judged("it", 0, len)] * 2, lambda exchange: None, wait_s=0.2)
    for error in told[:2]:
        assert isinstance(error, errors.ProcessError)
        assert "process 2 of 3 did not arrive at it within 0.2 s" in str(error)


def test_a_process_that_makes_another_call_is_named() -> None:
    told = at_once(lambda e: e.judged("training", 0, len), lambda e: e.judged("evaluation", 0, len))
    for error in told:
        assert isinstance(error, errors.ProcessError)
        assert re.search(rf"process 1 {HOST} is at evaluation, but process 0 {HOST} at training", str(error))


def test_what_process_0_raises_all_raise() -> None:
    def refuse() -> None:
        raise errors.BudgetError("too much")

    def fail() -> None:
        raise KeyError("lost")

    told = at_once(*[lambda exchange: exchange.made_once("it", refuse)] * 2)
    assert [(type(error), str(error)) for error in told] == [(errors.BudgetError, "too much")] * 2
    told = at_once(*[lambda exchange: exchange.made_once("it", fail)] * 2)
    assert isinstance(told[0], KeyError) and isinstance(told[1], errors.ProcessError)
    assert re.search(rf"process 0 {HOST} failed at it: KeyError", str(told[1]))


# -- the verdict, without processes ----------------------------------------------------------

MEMBERS = [Member(i, f"host{i}") for i in range(3)]


def records(*calls: int, beat: int = 1, **of_1: Any) -> dict[int, Record]:
    return {m.index: Record(m, beat, calls[m.index], **(of_1 if m.index == 1 else {})) for m in MEMBERS}


def test_silence_is_a_fault_only_after_its_time() -> None:
    judge = Judge(MEMBERS, timeout_s=10, step_timeout_s=1000)
    assert judge.verdict(records(5, 5, 5), 0.0) is None
    for second in range(1, 11):
        alive = {i: r for i, r in records(5, 5, 5, beat=1 + second).items() if i != 2}
        assert judge.verdict(alive, float(second)) is None
    told = judge.verdict({}, 10.5)
    assert told is not None and told.startswith(
        "process 2 (host host2) has given no sign of life for 10 s, since call 5"
    )


def test_who_is_behind_hangs_and_who_waits_does_not() -> None:
    judge = Judge(MEMBERS, timeout_s=1e6, step_timeout_s=10)
    assert judge.verdict(records(6, 5, 6, where="load.py:3 (read)"), 0.0) is None
    told = judge.verdict(records(6, 5, 6, beat=2, where="load.py:3 (read)"), 11.0)
    assert told == (
        "process 1 (host host1) hangs at load.py:3 (read): for 11 s it has called its step 5 times, while others wait in"
        " call 6"
    )


def test_a_hanging_collective_is_reported_without_a_culprit() -> None:
    judge = Judge(MEMBERS, timeout_s=1e6, step_timeout_s=10)
    assert judge.verdict(records(6, 6, 6), 0.0) is None
    told = judge.verdict(records(6, 6, 6, beat=2), 11.0)
    assert told is not None and told.startswith("no process has got beyond call 6 of the step for 11 s")


def test_who_leaves_early_is_named() -> None:
    judge = Judge(MEMBERS, timeout_s=1e6, step_timeout_s=10)
    assert judge.verdict(records(6, 5, 6, state="finished"), 0.0) is None
    told = judge.verdict(records(6, 5, 6, beat=2, state="finished"), 11.0)
    assert told == "process 1 (host host1) left the loop after 5 times, while others wait in call 6"


def test_an_error_of_the_runtime_waits_for_its_cause() -> None:
    judge = Judge(MEMBERS, timeout_s=10, step_timeout_s=1000)
    met = records(6, 6, 6, state="met", error="JaxRuntimeError: Gloo")
    assert judge.verdict({i: r for i, r in met.items() if i != 2}, 0.0) is None
    later = records(6, 6, 6, beat=2, state="met", error="JaxRuntimeError: Gloo")
    told = judge.verdict({i: r for i, r in later.items() if i != 2}, 10.5)
    assert told is not None and told.startswith("process 2 (host host2) has given no sign of life")


def test_a_straggler_is_measured_by_what_others_wait_for() -> None:
    timed = {
        i: Record(m, 1, 20, times={"step": (0.2, (0.0, 0.15, 0.01)[i], (0.2, 0.05, 0.19)[i])})
        for i, m in enumerate(MEMBERS)
    }
    slowest = step_times(timed)[0]
    assert slowest.member.index == 1
    assert slowest.factor == pytest.approx((0.15 + 0.05) / ((0.05 + 0.06) / 2))


def test_a_watch_of_one_process_only_measures() -> None:
    step = autopar.parallelize(mesh="8")(process_programs.step_of())
    with autopar.watch(step) as watched:
        process_programs.trained(step)
        times = watched.step_times()
    assert [one.member.index for one in times] == [0]
    assert times[0].factor == 1.0 and times[0].step_s > 0
    assert step.clock is None


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(errors.StepSignatureError, match=r"made by `autopar.parallelize`.*got a function"):
        autopar.watch(process_programs.step_of())
    with pytest.raises(errors.ProcessError, match="timeouts must be above 0 s; got 0 and 1800"):
        autopar.watch(timeout_s=0)


def test_an_error_of_the_loop_goes_through_a_watch_of_one_process() -> None:
    with pytest.raises(KeyError), autopar.watch(timeout_s=1):
        raise KeyError("own")


def test_a_process_that_dies_silently_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free.listen()
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert "process 1 was ended from outside its loop" in process_sentinel.line("process 1", "process 0", address)
    assert "process 0, which runs" in process_sentinel.line("process 1", "process 0", address)
    assert "process 0 was ended from outside its loop" in process_sentinel.line("process 0", "process 0", address)
