"""Plans use a part of the devices where more of them do not make the step faster, say so, and run there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import MeshError, PlanFileError, PlanMismatchError
from autopar.hardware.profile import HardwareProfile, LinkProfile, load
from autopar.planner import mesh_search
from autopar.planner.fewer_devices import least_s, parts_of
from autopar.planner.simplest_plan import TIE
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute

#: Two hosts of 4 CPU devices on a slow network: small steps run on one host.
TWO_HOSTS = replace(load("cpu-host"), devices_per_host=4, network_link=LinkProfile(1e9, 1e-3))


def planned(program: programs.Program, **options: Any) -> Plan:
    return autopar.plan(program.step, *program.abstract_args(), **options)


def small_bert() -> programs.Program:
    return programs.bert_layers(batch=8, seq=256, hidden=512, heads=8, num_layers=1)


def test_a_small_batch_uses_one_host_of_two_and_says_so() -> None:
    plan = planned(small_bert(), num_devices=16, hardware="h100-sxm")
    assert (plan.num_devices, plan.available_devices) == (8, 16)
    (note,) = [note for note in plan.notes if "of 16 devices" in note]
    assert note.startswith("8 of 16 devices: more do not help at a batch of 8. On all 16 (mesh ")
    text = str(autopar.explain(plan))
    assert "for 8 of 16 h100-sxm devices, mesh 8" in text
    assert note.split(":")[0] in text
    rejected = [one for one in plan.rejected if one.mesh.num_devices == 16]
    assert rejected
    assert min(one.step_time_s for one in rejected) >= (1 - TIE) * plan.prediction.step_time_s
    assert plan.mesh not in [one.mesh for one in plan.rejected]


def test_all_devices_a_mesh_or_a_pin_leave_no_choice() -> None:
    bert = small_bert()
    for options in (
        {"num_devices": 16, "all_devices": True},
        {"mesh": "2x8"},
        {"num_devices": 16, "pin": {"state/params/*/kernel": PartitionSpec(None, "data")}},
    ):
        plan = planned(bert, hardware="h100-sxm", **options)
        assert (plan.num_devices, plan.available_devices) == (16, None), options
        assert not any("more do not help" in note for note in plan.notes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("program", "hardware"),
    [
        (programs.mlp(), "cpu-host"),
        (programs.mlp(batch=256, width=256), TWO_HOSTS),
        (programs.bert_layers(), TWO_HOSTS),
        (programs.bert_layers(batch=6, seq=64), "h100-sxm"),
        (programs.gpt(), TWO_HOSTS),
    ],
)
def test_more_devices_never_make_the_plan_slower(program: programs.Program, hardware: str | HardwareProfile) -> None:
    times = {n: planned(program, num_devices=n, hardware=hardware).prediction.step_time_s for n in (1, 2, 4, 6, 8, 16)}
    for n, seconds in times.items():
        fewer = [times[part] for part in parts_of(n, load("cpu-host")) if part in times]
        assert seconds <= (1 + TIE) * min(fewer, default=seconds), (n, times)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hardware", ["cpu-host", "h100-sxm"])
@pytest.mark.parametrize(
    "program", [programs.mlp(batch=512, width=256), programs.bert_layers(), programs.cnn_batchnorm()]
)
def test_no_plan_is_faster_than_one_device_divided_evenly(program: programs.Program, hardware: str) -> None:
    one_device_s = planned(program, mesh="1", hardware=hardware).prediction.step_time_s
    for n in (2, 4, 8):
        assert planned(program, mesh=str(n), hardware=hardware).prediction.step_time_s >= least_s(one_device_s, n)


def test_a_part_of_the_devices_is_planned_only_where_it_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """At twice the speed of half the devices or more, only one device is planned besides all."""
    begun: list[int] = []
    begin = mesh_search.begin

    def noted(mesh: Any, *args: Any) -> Any:
        begun.append(mesh.num_devices)
        return begin(mesh, *args)

    monkeypatch.setattr(mesh_search, "begin", noted)
    large = programs.mlp(batch=1 << 15, width=512)
    plan = planned(large, num_devices=8, hardware="cpu-host")
    assert plan.num_devices == 8
    assert set(begun) == {8, 1}
    begun.clear()
    planned(programs.bert_layers(), num_devices=8, hardware=TWO_HOSTS)
    assert {8, 4, 1} <= set(begun)


@dataclass
class Running:
    """A step that runs on 4 of 8 devices."""

    program: programs.Program
    step: Any
    state: Any
    batch: Any


def running(**options: Any) -> Running:
    program = programs.bert_layers()
    step = autopar.parallelize(**{"hardware": TWO_HOSTS, "cache": False} | options)(program.step)
    batch = program.make_batch(0)
    state = step.init(program.create_state, jax.random.key(0), batch=batch)
    return Running(program, step, state, batch)


def devices_of(tree: Any) -> set[Any]:
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.sharding.device_set}


def test_the_step_runs_on_the_first_devices_as_under_jit(tmp_path: Path) -> None:
    run = running()
    first = set(jax.devices()[:4])
    assert devices_of(run.state) == first
    expected_state = jax.tree.map(np.asarray, run.state)
    state, expected = run.state, jax.device_put(expected_state)
    for n in range(2):
        batch = run.program.make_batch(n)
        state, loss = run.step(state, batch)
        expected, expected_loss = jax.jit(run.program.step)(expected, batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert devices_of(state) == first
    plan = run.step.latest_plan
    assert plan is not None
    assert plan.available_devices == 8
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5), state, expected)

    # arrays elsewhere: another device, and all devices
    last = jax.devices()[-1]
    _, elsewhere = run.step(jax.device_put(expected_state, last), jax.device_put(run.batch, last))
    _, again = run.step(jax.device_put(expected_state), run.batch)
    np.testing.assert_allclose(elsewhere, again, rtol=1e-6)

    # the plan file
    path = tmp_path / "plan.json"
    plan.save(path)
    assert autopar.load_plan(path) == plan
    replayed = running(plan=path)
    assert devices_of(replayed.state) == first
    np.testing.assert_allclose(replayed.step(replayed.state, run.batch)[1], again, rtol=1e-6)

    # a second step on the same state
    loss_only = autopar.parallelize(lambda state, batch: run.program.step(state, batch)[1], like=run.step)
    np.testing.assert_allclose(loss_only(jax.device_put(expected_state), run.batch), again, rtol=1e-5)
    assert loss_only.latest_plan is not None
    assert loss_only.latest_plan.available_devices == 8

    # checkpoints, also on all devices
    with autopar.Checkpoints(tmp_path / "checkpoints", run.step) as checkpoints:
        checkpoints.save(2, state)
    whole = running(all_devices=True)
    assert devices_of(whole.state) == set(jax.devices())
    for step, devices in ((run.step, first), (whole.step, set(jax.devices()))):
        saved = autopar.Checkpoints(tmp_path / "checkpoints", step)
        restored = saved.restore(run.program.create_state, jax.random.key(0), batch=run.batch)
        assert devices_of(restored) == devices
        jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_a_plan_for_a_part_needs_as_many_visible_devices() -> None:
    program = programs.bert_layers()
    plan = planned(program, num_devices=8, hardware=TWO_HOSTS)
    elsewhere = replace(plan, available_devices=16)
    with pytest.raises(PlanFileError, match="`available_devices` must be more than the 4 devices of the mesh"):
        Plan.from_json(replace(plan, available_devices=4).to_json())
    with pytest.raises(MeshError, match="needs 4 devices, but"):
        autopar.parallelize(plan=elsewhere, cache=False)(program.step)(*program.args())


def test_like_accepts_both_numbers() -> None:
    program = programs.bert_layers()
    plan = planned(program, num_devices=8, hardware=TWO_HOSTS)
    for number in (None, 4, 8):
        second = planned(program, like=plan, num_devices=number, hardware=TWO_HOSTS)
        assert (second.mesh, second.available_devices) == (plan.mesh, 8)
    with pytest.raises(PlanMismatchError, match="`num_devices` is 2"):
        planned(program, like=plan, num_devices=2)


@dataclass(frozen=True)
class Absent:
    """A device of another process."""

    id: int
    process_index: int
    platform: str = "gpu"
    slice_index: int = 0


def test_no_process_may_be_left_without_a_device() -> None:
    plan = planned(small_bert(), num_devices=16, hardware="h100-sxm")
    devices = [Absent(n, n // 8) for n in range(16)]
    with pytest.raises(MeshError) as refused:
        execute.make_mesh(plan.mesh, devices, available=plan.available_devices)
    assert str(refused.value) == (
        "the plan uses 8 of 16 devices, and process 1 would have none of them: start 1 process, or plan for all devices with"
        " `all_devices=True`"
    )
    assert execute.first_devices(plan.mesh, [Absent(n, 0) for n in range(16)]) == [Absent(n, 0) for n in range(8)]
