"""Pipeline steps by `parallelize`: planned, run, saved, explained, compared, verified, refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from pipelines import tanh_layers

import autopar
from autopar.api.plan_in_stages import cluster_of
from autopar.cli.main import main
from autopar.errors import (
    AutoparError,
    BudgetError,
    ClusterError,
    MicrobatchError,
    PlanFileError,
    PlanMismatchError,
    ScheduleError,
    StepSignatureError,
)
from autopar.hardware.profile import HardwareProfile, LinkProfile, load
from autopar.pipeline.draw.svg import timeline_svg
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup
from autopar.pipeline.search.plan_stages import plan_stages
from autopar.pipeline.search.request import SlowStagesError, StageRequest
from autopar.transforms.program import program_of

#: The devices here, with collectives so cheap that stages of small models have several devices.
CPU = replace(load("cpu-host"), collective_launch_s=1e-6)
OPTIONS: dict[str, Any] = {"stages": 2, "num_microbatches": 4, "schedule": "1f1b", "hardware": CPU}
H100 = load("h100-sxm")
#: Two of its devices in a host, and hosts joined by links a hundred times slower.
SLOW = replace(H100, network_link=LinkProfile(H100.host_link.bytes_per_s / 100, 1e-5), devices_per_host=2)


@cache
def mlp() -> programs.Program:
    return programs.mlp(batch=64, width=64, num_layers=4, optimizer="adam")


@cache
def staged() -> Any:
    step = autopar.parallelize(**OPTIONS)(mlp().step)
    step.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    return step


@cache
def plan() -> autopar.PipelinePlan:
    return staged().latest_plan


def devices_of(leaf: jax.Array) -> list[int]:
    return sorted(device.id for device in leaf.sharding.device_set)


def wide(width: int = 4096, layers: int = 8, batch: int = 8192, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """Large enough for links to matter."""

    params = [jax.ShapeDtypeStruct((width, width), dtype)] * layers
    return tanh_layers, (params, jax.ShapeDtypeStruct((batch, width), dtype))


# -- running ---------------------------------------------------------------------------------


@pytest.mark.contract
def test_a_step_in_stages_trains_as_on_one_device() -> None:
    step, reference = staged(), jax.jit(mlp().step)
    state = step.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    expected = jax.jit(mlp().create_state)(jax.random.key(0))
    for seed in range(3):
        state, loss = step(state, mlp().make_batch(seed))
        expected, expected_loss = reference(expected, mlp().make_batch(seed))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state.params, expected.params)
    assert len(step.plans) == 1


@pytest.mark.contract
def test_a_state_is_built_where_its_stages_stand() -> None:
    state = staged().init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    first, last = (devices_of(state.params[f"Dense_{n}"]["kernel"]) for n in (0, 3))
    assert first == [0, 1, 2, 3] and last == [4, 5, 6, 7]
    assert devices_of(state.opt_state[0].mu["Dense_3"]["kernel"]) == last
    expected = jax.jit(mlp().create_state)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(expected))


def test_a_state_from_elsewhere_is_laid_out() -> None:
    state, batch = mlp().args()
    new, loss = staged()(state, batch)
    assert np.isfinite(float(loss))
    assert devices_of(new.params["Dense_3"]["kernel"]) == [4, 5, 6, 7]


def test_batches_are_sharded_and_new_shapes_are_planned() -> None:
    step = staged()
    state = step.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    batch = step.shard_batch(mlp().make_batch(1))
    assert np.isfinite(float(step(state, batch)[1]))


def test_a_report_holds_steps_against_the_plan() -> None:
    step = staged()
    state = step.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    for seed in range(6):
        state, _ = step(state, mlp().make_batch(seed))
    told = step.report()
    assert told.predicted_s == plan().prediction.step_time_s
    assert told.num_steps >= 4 and told.model_flops > 0 and "2 stages, 1f1b, 4 microbatches" in str(told)


# -- plans -----------------------------------------------------------------------------------


def test_a_plan_says_what_it_does() -> None:
    one = plan()
    assert one.schedule == "1f1b" and one.num_microbatches == 4 and one.num_devices == 8
    assert [len(stage.devices) for stage in one.stages] == [4, 4]
    assert one.stages[0].last_layer + 1 == one.stages[1].first_layer
    assert one.prediction.step_time_s == pytest.approx(one.timeline().makespan_s)
    assert len(one.prediction.stage_bytes) == 2 and one.prediction.peak_bytes == max(one.prediction.stage_bytes)
    stages = {t.path: parts[0].stage for t, parts in zip(one.inputs, one.input_parts, strict=True)}
    assert stages["state/params/Dense_0/kernel"] == 0 and stages["state/params/Dense_3/kernel"] == 1
    assert {t.path: t.role for t in one.inputs}["state/opt_state/0/mu/Dense_3/kernel"] == "optimizer"


def test_a_saved_plan_is_the_same_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "stages.plan.json"
    plan().save(path)
    assert autopar.load_plan(path) == plan()
    again = autopar.parallelize(plan=path)(mlp().step)
    state = again.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    expected = jax.jit(mlp().step)(*mlp().args())[1]
    np.testing.assert_allclose(again(state, mlp().make_batch(0))[1], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda p: p["stages"][1].update(first_layer=0), "stages[1].first_layer"),
        (lambda p: p["stages"][1]["submesh"].update(first_device=8), "stages[1].submesh"),
        (lambda p: p.update(input_parts=[]), "input_parts"),
        (lambda p: p["input_parts"][0][0].update(stage=2), "input_parts[0]"),
        (lambda p: p["input_parts"][0][0].update(rows=[0, 1, 99]), "input_parts[0]"),
        (lambda p: p.update(virtual=3), "stages"),
        (lambda p: p["cluster"]["groups"][0].update(num_hosts=0), "cluster"),
        (lambda p: p.update(num_microbatches="four"), "num_microbatches"),
        (lambda p: p.pop("schedule"), "schedule"),
    ],
)
def test_a_damaged_plan_names_the_field(change: Any, field: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(plan().to_json()))
    change(document)
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(PlanFileError) as caught:
        autopar.load_plan(tmp_path / "p.json")
    assert f"`{field}`" in str(caught.value)


def test_a_plan_of_another_step_is_refused() -> None:
    other = programs.mlp(batch=32, width=32, num_layers=4, optimizer="adam")
    with pytest.raises(PlanMismatchError, match="another program"):
        autopar.parallelize(plan=plan())(other.step)(*other.args())


@pytest.mark.slow
def test_a_kept_plan_is_found_again(tmp_path: Path) -> None:
    options = OPTIONS | {"cache": tmp_path, "num_devices": 8}
    first = autopar.plan(mlp().step, *mlp().abstract_args(), **options)
    assert len(list((tmp_path / "plans").iterdir())) == 1
    assert autopar.plan(mlp().step, *mlp().abstract_args(), **options) == first  # seconds of the search included
    autopar.plan(mlp().step, *mlp().abstract_args(), **options | {"num_microbatches": 2})
    assert len(list((tmp_path / "plans").iterdir())) == 2


# -- what is chosen --------------------------------------------------------------------------


def test_where_stages_do_not_help_there_is_one_program() -> None:
    step, args = wide(batch=1024)
    found = autopar.plan(step, *args, stages="auto", num_microbatches=1, num_devices=2, hardware=H100)
    assert isinstance(found, autopar.Plan)
    assert any("one program" in note for note in found.notes)


def test_slow_links_between_hosts_are_a_reason_for_stages() -> None:
    step, args = wide(width=8192, batch=16384)
    found = autopar.plan(step, *args, stages="auto", num_microbatches=8, num_devices=4, hardware=SLOW)
    assert isinstance(found, autopar.PipelinePlan)
    assert len(found.stages) > 1
    assert all(len({device // 2 for device in stage.devices}) == 1 for stage in found.stages), "none is on two hosts"
    whole = autopar.plan(step, *args, num_microbatches=8, num_devices=4, hardware=SLOW)
    assert found.prediction.step_time_s < whole.prediction.step_time_s
    alone = [other for other in found.tried if not other.schedule]
    assert alone and alone[0].step_time_s == pytest.approx(whole.prediction.step_time_s, rel=0.05)


def test_stages_stand_on_two_kinds_of_device() -> None:
    step, args = wide(batch=65536, dtype=jnp.float16)
    hardware = {"a100-sxm-40": 1, "v100-sxm-16": 1}
    found = autopar.plan(step, *args, stages=2, num_microbatches=4, schedule="1f1b", hardware=hardware)
    kinds = [stage.submesh.shape.kind for stage in found.stages]
    assert sorted(kinds) == sorted(hardware) and found.hardware == "a100-sxm-40 + v100-sxm-16"
    layers = {k: s.last_layer - s.first_layer + 1 for k, s in zip(kinds, found.stages, strict=True)}
    assert layers["a100-sxm-40"] >= layers["v100-sxm-16"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stages": 0}, ClusterError, "`stages` is 0"),
        ({"stages": "two"}, ClusterError, '"auto"'),
        ({"stages": 1}, ClusterError, "`schedule` applies to pipeline stages only"),
        ({"stages": 9}, ClusterError, "at most"),
        ({"rematerialize": False}, ClusterError, "`rematerialize` applies to one program"),
        ({"schedule": "gpip"}, ScheduleError, "Did you mean 'gpipe'"),
        ({"num_microbatches": 5}, MicrobatchError, "5"),
        ({"num_microbatches": 0}, MicrobatchError, "`num_microbatches` is 0"),
        ({"memory_budget_bytes": 1e4}, BudgetError, "train_step` fit 9.50 KB per device"),
        ({"hardware": {"h100-sxm": 4}, "num_devices": 8}, ClusterError, "names 4 devices, but 8"),
        ({"hardware": H100, "num_devices": 12}, ClusterError, "not whole hosts of 8"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[AutoparError], words: str) -> None:
    with pytest.raises(error) as caught:
        autopar.plan(mlp().step, *mlp().abstract_args(), **{"num_devices": 8} | OPTIONS | options)
    assert words in str(caught.value)


def test_one_program_takes_one_kind_of_device() -> None:
    with pytest.raises(ClusterError, match="one program runs on one kind of device"):
        autopar.plan(mlp().step, *mlp().abstract_args(), hardware={"h100-sxm": 4, "a100-sxm-40": 4})


def test_devices_that_are_not_here_are_refused_before_planning() -> None:
    step = autopar.parallelize(**OPTIONS | {"num_devices": 16, "hardware": H100})(mlp().step)
    with pytest.raises(AutoparError, match="16 devices, but 8"):
        step(*mlp().args())


def test_hosts_are_whole() -> None:
    cluster, profiles = cluster_of("h100-sxm", 16)
    assert str(cluster) == "2x8 h100-sxm" and isinstance(profiles["h100-sxm"], HardwareProfile)
    assert str(cluster_of("h100-sxm", 3)[0]) == "1x3 h100-sxm"


# -- what is told ----------------------------------------------------------------------------


def test_an_explanation_has_stages_and_a_timeline() -> None:
    text = str(autopar.explain(plan()))
    assert "in 2 stages for 8 devices (1x8 cpu-host)" in text
    assert "Timeline of a step, simulated" in text and "submesh 1" in text and "F0" in text
    assert max(map(len, text.splitlines())) <= 100
    ElementTree.fromstring(timeline_svg(plan().timeline()))


def test_stages_and_one_program_are_compared() -> None:
    whole = autopar.plan(mlp().step, *mlp().abstract_args(), mesh="8", hardware="cpu-host")
    told = autopar.diff(plan(), whole)
    assert "2 stages on 1x8 cpu-host -> 8" in told.summary and told.num_state == 26
    assert not told.same_state and len(told.held_bytes) == 8
    assert autopar.diff(plan(), plan()).same_state
    back = autopar.diff(whole, plan())
    held = [t.num_bytes for t in plan().inputs if t.role != "data"]
    assert sum(back.held_bytes) == pytest.approx(4 * sum(held))  # of each stage, four devices
    json.dumps(told.to_json())


def test_the_command_line_plans_explains_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan().save("p.json")
    assert main(["explain", "p.json"]) == 0
    assert "in 2 stages" in capsys.readouterr().out
    assert main(["explain", "p.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["stages"]) == 2 and len(document["timeline"]) == 2 * (2 * 4 + 1)
    assert main(["explain", "p.json", "--stage", "1", "--timeline", "t.svg"]) == 0
    assert "stage 1 of" in capsys.readouterr().out
    ElementTree.parse("t.svg")
    assert main(["explain", "p.json", "--timeline", "t.json"]) == 0
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    capsys.readouterr()
    assert main(["explain", "p.json", "--stage", "2"]) == 2
    assert "stages 0 to 1" in capsys.readouterr().err
    assert main(["explain", "p.json", "--timeline", "nowhere/t.svg"]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_each_stage_is_compiled_for_its_devices() -> None:
    step, args = wide(width=1024, layers=4, batch=4096)
    told = autopar.verify(
        step, *args, stages=2, num_microbatches=4, schedule="1f1b", num_devices=4, hardware="h100-sxm"
    )
    assert len(told.stages) == 2 and told.fits
    for one, stage in zip(told.stages, told.plan.stages, strict=True):
        assert one.plan.mesh == stage.plan.mesh
        assert {time.phase for time in one.times} == {"forward", "backward", "update"}
    assert all(0.6 <= figure.predicted / figure.compiled <= 1.4 for figure in told.memory)
    assert 0.6 <= told.step_time.predicted / told.step_time.compiled <= 1.4
    assert "Compiled pieces" in str(told)
    assert json.loads(json.dumps(told.to_json()))["stages"]


def test_there_is_no_program_to_lower() -> None:
    with pytest.raises(StepSignatureError, match="verify"):
        staged().lower(*mlp().abstract_args())


# -- checkpoints -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_state_goes_from_stages_to_one_program_and_back(tmp_path: Path) -> None:
    state = staged().init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    state, _ = staged()(state, mlp().make_batch(0))
    before = jax.tree.map(np.asarray, jax.tree.leaves(state))
    shapes = (mlp().create_state, jax.random.key(0))
    with autopar.Checkpoints(tmp_path / "a", staged()) as saved:
        saved.save(1, state)
    whole = autopar.parallelize(mesh="8", hardware="cpu-host")(mlp().step)
    with autopar.Checkpoints(tmp_path / "a", whole) as restored:
        state = restored.restore(*shapes, batch=mlp().make_batch(0))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), before)
        assert restored.last_map is not None and "2 stages on 1x8 cpu-host -> 8" in restored.last_map.summary
        state, _ = whole(state, mlp().make_batch(1))
        restored.save(2, state)
    after = jax.tree.map(np.asarray, jax.tree.leaves(state))
    with autopar.Checkpoints(tmp_path / "a", staged()) as back:
        state = back.restore(*shapes, batch=mlp().make_batch(0))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), after)
    assert devices_of(state.params["Dense_3"]["kernel"]) == [4, 5, 6, 7]
    assert np.isfinite(float(staged()(state, mlp().make_batch(2))[1]))


# -- what a user has decided -----------------------------------------------------------------


@pytest.mark.slow
def test_what_is_not_donated_stays() -> None:
    step = autopar.parallelize(**OPTIONS, donate=[])(mlp().step)
    state = step.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    losses = [float(step(state, mlp().make_batch(0))[1]) for _ in range(2)]
    assert losses[0] == losses[1]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_a_given_mesh_is_kept_where_one_program_is_faster() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
    program = programs.mlp(batch=2048, width=64, num_layers=4, optimizer="adam")
    step = autopar.parallelize(stages="auto", num_microbatches=1, mesh=mesh, hardware="cpu-host", cache=False)(
        program.step
    )
    state, batch = program.args()
    assert np.isfinite(float(step(state, batch)[1]))
    assert isinstance(step.latest_plan, autopar.Plan) and step.latest_plan.mesh.axis_names == ("rows", "columns")


def test_stages_slower_than_a_limit_are_not_planned() -> None:
    """The time of one program limits the search for stages."""
    program = program_of(mlp().step, mlp().abstract_args(), carry=None, donate=None)
    request = StageRequest(
        cluster=Cluster((DeviceGroup(CPU.name, 1, 4),)), profiles={CPU.name: CPU}, num_microbatches=4
    )
    plan = plan_stages(program, request)
    with pytest.raises(SlowStagesError) as slow:
        plan_stages(program, replace(request, limit_s=0.01 * plan.prediction.step_time_s))
    assert all(one.reason or one.step_time_s < math.inf for one in slow.value.tried)
    again = plan_stages(program, replace(request, limit_s=1.01 * plan.prediction.step_time_s))
    assert again.prediction.step_time_s <= 1.01 * plan.prediction.step_time_s  # one stage is left out
