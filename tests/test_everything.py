"""`everything="auto"` chooses one program or stages, and says why each alternative lost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P
from test_stages_pinned import RULES, apply, batch_of, create, create_model, forward, trained
from test_verify import StandIn, peak_of

import autopar
from autopar.api.make_plan import option_names
from autopar.cli.main import main
from autopar.errors import BudgetError, ClusterError, MeshError, OptionError, PinError
from autopar.hardware.profile import LinkProfile, load
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.plan_files import plan_from_json
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.simplest_plan import TIE
from autopar.plans.considered import Considered
from autopar.plans.plan import Plan
from autopar.report.considered import considered_rows
from autopar.verification.verification import Verification
from autopar.verification.verify import _spread
from autopar.verification.verify_stages import StagesVerification

V100 = load("v100-sxm-16")
#: Hosts of two devices on slow links, where stages are faster than one program.
SLOW = replace(V100, network_link=LinkProfile(1e8, 1e-5), devices_per_host=2)


@cache
def mlp() -> programs.Program:
    return programs.mlp(batch=64, width=64, num_layers=4, optimizer="adam")


@cache
def wide() -> programs.Program:
    return programs.mlp(batch=64, width=512, num_layers=4, optimizer="adam")


def planned(program: programs.Program, **options: Any) -> Plan | PipelinePlan:
    return autopar.plan(program.step, *program.abstract_args(), **{"everything": "auto", "num_devices": 4} | options)


def check_reasons(plan: Plan | PipelinePlan, budget_bytes: float) -> None:
    """Each row but that of the plan has a reason, and the reason of each faster row holds by its figures."""
    chosen, *others = plan.considered
    assert chosen.is_chosen
    assert not any(row.is_chosen for row in others)
    assert chosen.step_time_s == plan.prediction.step_time_s
    assert chosen.peak_bytes == plan.prediction.peak_bytes
    assert chosen.num_microbatches == plan.num_microbatches
    assert (chosen.schedule, chosen.num_stages) == (
        (plan.schedule, len(plan.stages)) if isinstance(plan, PipelinePlan) else ("", 1)
    )
    for row in others:
        assert row.reason.strip()
        if row.reason.startswith("slower"):
            assert row.step_time_s > chosen.step_time_s
        if row.step_time_s >= chosen.step_time_s:
            continue
        if row.certainty == "planned" and not row.schedule:
            fits = row.peak_bytes <= MemoryBudget(budget_bytes).plan_bytes
            tied = row.step_time_s >= chosen.step_time_s / (1 + TIE) ** 2
            assert tied or "within 0.5 %" in row.reason if fits else "fit" in row.reason or tied, row
        elif row.certainty == "priced":
            assert "planned" in row.reason, row
        else:
            assert row.certainty == "planned", row
            assert "do not fit" in row.reason or "counts as equal" in row.reason, row
    shown, left = considered_rows(plan.considered)
    assert len(shown) + left == len(plan.considered)
    assert {row for row in plan.considered if row.step_time_s <= chosen.step_time_s} <= {one.row for one in shown} | {
        row for row in plan.considered if row.step_time_s == chosen.step_time_s
    }


@pytest.mark.slow
@pytest.mark.parametrize("hardware", [load("cpu-host"), V100, SLOW], ids=["cpu", "v100", "slow links"])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.45])
@pytest.mark.parametrize("model", ["mlp", "wide"])
def test_no_faster_row_without_a_reason_that_holds(model: str, share: float, hardware: Any) -> None:
    program = {"mlp": mlp, "wide": wide}[model]()
    free = planned(program, hardware=hardware)
    budget = hardware.usable_bytes
    if share < 1:
        budget = share * max(row.peak_bytes for row in free.considered if row.peak_bytes < math.inf)
    try:
        plan = planned(program, hardware=hardware, memory_budget_bytes=budget)
    except autopar.errors.BudgetError:
        assert share < 1
        return
    check_reasons(plan, budget)
    assert plan.prediction.peak_bytes <= budget
    assert plan.prediction.step_time_s >= 0.995 * free.prediction.step_time_s


@pytest.mark.slow
def test_the_plan_is_the_faster_of_both() -> None:
    for hardware in (V100, SLOW):
        plan = planned(wide(), hardware=hardware, num_devices=8)
        one = planned(wide(), hardware=hardware, num_devices=8, everything=None, num_microbatches="auto")
        staged = planned(wide(), hardware=hardware, num_devices=8, everything=None, stages="auto")
        assert plan.prediction.step_time_s <= min(one.prediction.step_time_s, staged.prediction.step_time_s) * (1 + TIE)
        check_reasons(plan, hardware.usable_bytes)
    assert {row.num_devices for row in plan.considered if not row.schedule} >= {8, 1}


def test_stages_win_where_links_are_slow_and_the_record_has_one_program() -> None:
    plan = planned(mlp(), hardware=load("cpu-host"))
    assert isinstance(plan, PipelinePlan)
    assert any(not row.schedule and row.certainty == "planned" for row in plan.considered)
    assert any(row.certainty == "priced" for row in plan.considered)
    (bounded,) = [row for row in plan.considered if row.certainty == "bounded"]
    assert "not faster by a bound" in bounded.reason


@pytest.mark.slow
def test_short_memory_is_a_reason_with_figures() -> None:
    free = planned(mlp(), hardware="cpu-host", stages=1)
    assert isinstance(free, Plan)
    budget = 0.8 * free.prediction.peak_bytes
    plan = planned(mlp(), hardware="cpu-host", stages=1, memory_budget_bytes=budget)
    assert plan.prediction.peak_bytes <= budget
    rows = [row for row in plan.considered if (row.step_time_s, row.mesh) == (free.prediction.step_time_s, free.mesh)]
    assert rows
    assert any(row.reason.startswith("does not fit: needs ") for row in rows)
    check_reasons(plan, budget)


# -- options of the user -----------------------------------------------------------------------


def test_what_the_user_fixes_is_kept() -> None:
    plan = planned(mlp(), hardware="cpu-host", stages=2, schedule="1f1b", num_microbatches=4)
    assert isinstance(plan, PipelinePlan)
    assert (len(plan.stages), plan.schedule, plan.num_microbatches) == (2, "1f1b", 4)
    assert [row.reason for row in plan.considered if not row.schedule] == ["not planned: `stages` is 2"]
    one = planned(mlp(), hardware="cpu-host", stages=1)
    assert isinstance(one, Plan)
    assert "stages are not planned: `stages` is 1" in [row.reason for row in one.considered]
    in_four = planned(mlp(), hardware="cpu-host", stages=1, num_microbatches=4)
    assert in_four.num_microbatches == 4


def test_a_mesh_is_that_of_one_program_and_of_stages() -> None:
    plan = planned(mlp(), hardware="cpu-host", mesh="2x2")
    meshes = {row.mesh for row in plan.considered if row.mesh is not None}
    assert len(meshes) == 1
    part = planned(mlp(), hardware="cpu-host", mesh="2")
    assert isinstance(part, PipelinePlan)
    assert {stage.plan.mesh.num_devices for stage in part.stages} == {2}
    assert any("it cannot have the mesh" in row.reason for row in part.considered)


def test_pins_hold_in_whatever_wins() -> None:
    pin = {"state/params/*/kernel": P(None, "data")}
    plan = planned(wide(), hardware="cpu-host", pin=pin)
    stages = [stage.plan for stage in plan.stages] if isinstance(plan, PipelinePlan) else [plan]
    pinned = [
        one
        for plan in stages
        for one in plan.inputs
        if one.path.startswith("state/params") and one.path.endswith("kernel")
    ]
    assert pinned
    assert all(one.sharding.dims == ((), ("data",)) for one in pinned)


def test_like_keeps_the_mesh_or_the_stages_of_the_other_step() -> None:
    staged = planned(mlp(), hardware="cpu-host", stages=2, num_microbatches=4)
    plan = planned(mlp(), num_devices=None, like=staged)
    assert isinstance(plan, PipelinePlan)
    assert isinstance(staged, PipelinePlan)
    assert [stage.devices for stage in plan.stages] == [stage.devices for stage in staged.stages]
    assert any("`like` is the plan of" in row.reason for row in plan.considered)
    one = planned(mlp(), hardware="cpu-host", stages=1, mesh="2x2")
    plan = planned(mlp(), num_devices=None, like=one)
    assert isinstance(plan, Plan)
    assert isinstance(one, Plan)
    assert plan.mesh == one.mesh
    assert any(row.reason == "stages are not planned: `like` is the plan of one program" for row in plan.considered)


def test_stages_are_planned_where_one_program_cannot_have_the_pins() -> None:
    """A dim of 68 is split over the four devices of a stage, but not over all eight."""
    program = programs.mlp(batch=8, width=68, num_layers=2)
    pin = {"state/params/*/kernel": P(None, ("data", "model"))}
    plan = planned(program, hardware="cpu-host", num_devices=8, pin=pin)
    assert isinstance(plan, PipelinePlan)
    assert any("does not divide it" in row.reason for row in plan.considered if row.num_stages == 1)
    with pytest.raises(PinError, match="does not divide it"):
        planned(program, hardware="cpu-host", num_devices=8, pin=pin, stages=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=2,tp=2"], ids=["one program", "stages"])
def test_metadata_hints_are_followed_where_they_are_not_slower(mesh: str) -> None:
    """The mesh of all eight devices is that of one program, the mesh of four that of a stage."""
    args = jax.eval_shape(create_model, jax.random.key(0)), batch_of(0)
    options: dict[str, Any] = {"everything": "auto", "num_devices": 8, "hardware": "cpu-host", "mesh": mesh}
    by_metadata = {
        metadata: autopar.plan(trained(apply), *args, metadata=metadata, logical_axis_rules=RULES, **options)
        for metadata in ("pin", "hint", "ignore")
    }
    seconds = {metadata: plan.prediction.step_time_s for metadata, plan in by_metadata.items()}
    assert seconds["ignore"] <= seconds["hint"] <= max(1.05 * seconds["ignore"], min(seconds.values()))
    hint = by_metadata["hint"]
    follows = any("follows the metadata" in note for note in hint.notes)
    assert seconds["hint"] == seconds["pin" if follows else "ignore"]
    assert follows or any("following the metadata" in note and "would cost" in note for note in hint.notes)
    for plan in by_metadata.values():
        check_reasons(plan, load("cpu-host").usable_bytes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"stages": 2, "num_microbatches": 2}, {"stages": 1}], ids=str)
def test_a_second_step_is_like_the_first_and_both_run(options: dict[str, Any]) -> None:
    step = autopar.parallelize(everything="auto", hardware="cpu-host", cache=False, **options)(trained(forward))
    state, expected = step.init(create, jax.random.key(0), batch=batch_of(0)), jax.jit(create)(jax.random.key(0))
    evaluate = lambda state, batch: jax.numpy.mean((forward(state, batch["x"]) - batch["x"]) ** 2)  # noqa: E731
    beside = autopar.parallelize(like=step, everything="auto", cache=False)(evaluate)
    np.testing.assert_allclose(beside(state, batch_of(0)), jax.jit(evaluate)(expected, batch_of(0)), rtol=1e-5)
    plan, other = step.latest_plan, beside.latest_plan
    assert plan is not None and other is not None
    assert type(plan) is type(other)
    if isinstance(plan, PipelinePlan) and isinstance(other, PipelinePlan):
        stages, beside_them = ([stage.devices for stage in one.stages] for one in (plan, other))
        # Stages without parameters are no part of the evaluation's plan.
        assert beside_them == [devices for devices in stages if devices in beside_them]
    assert other.considered[0].is_chosen
    assert any("`like` is the plan of" in row.reason for row in other.considered)


@pytest.mark.parametrize(
    ("name", "value"), [("rematerialize", False), ("dims_as_written", True), ("attention", "auto"), ("dump", "folder")]
)
def test_options_of_one_program_need_one_stage(name: str, value: Any, tmp_path: Path) -> None:
    value = tmp_path if name == "dump" else value
    with pytest.raises(ClusterError, match=rf"`{name}` applies to one program, but with `everything`.*`stages=1` too"):
        planned(mlp(), hardware="cpu-host", **{name: value})
    if name != "dump":
        assert isinstance(planned(mlp(), hardware="cpu-host", stages=1, **{name: value}), Plan)


def test_other_values_and_a_given_plan_are_refused() -> None:
    for value in ("all", True, 1):
        with pytest.raises(OptionError, match=r'`everything` is .*: give "auto"'):
            planned(mlp(), hardware="cpu-host", everything=value)
    plan = planned(mlp(), hardware="cpu-host", stages=1)
    with pytest.raises(OptionError, match="`plan` is run as it is, so `everything` has nothing to choose"):
        autopar.parallelize(mlp().step, plan=plan, everything="auto")
    with pytest.raises(ClusterError, match="`schedule` applies to pipeline stages only"):
        planned(mlp(), hardware="cpu-host", stages=1, schedule="1f1b")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_devices": "4"}, ClusterError, "`num_devices` is '4': give a whole number of devices, 1 or more"),
        ({"num_devices": 0}, ClusterError, "`num_devices` is 0: give a whole number"),
        ({"num_devices": None, "hardware": {}}, ClusterError, "`hardware` names no devices: give the number by kind"),
        ({"num_devices": None, "hardware": {"cpu-host": -4}}, ClusterError, "number of 'cpu-host' in `hardware` is -4"),
        ({"mesh": "8"}, MeshError, "or another `num_devices`, which is 4"),
        pytest.param(
            {"memory_budget_bytes": 1000},
            BudgetError,
            "no plan on mesh .* Nor in stages: no stages of",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_options_name_the_rule_and_the_value(options: dict[str, Any], error: type, message: str) -> None:
    for stages in (None, 1) if "mesh" not in options and "num_devices" in options else (None,):
        with pytest.raises(error, match=message if options.get("hardware") is None or stages is None else "one kind"):
            planned(mlp(), **{"hardware": "cpu-host", "stages": stages} | options)


def test_two_kinds_of_devices_say_why_one_program_is_left_out() -> None:
    plan = planned(mlp(), num_devices=None, hardware={"a100-sxm-40": 2, "v100-sxm-16": 2})
    assert any("one program runs on one kind of device" in row.reason for row in plan.considered)


def test_one_device_is_one_program() -> None:
    plan = planned(mlp(), hardware="cpu-host", num_devices=1)
    assert plan.num_devices == 1
    check_reasons(plan, load("cpu-host").usable_bytes)


# -- files, the cache, reports, the command line -----------------------------------------------


@pytest.mark.contract
def test_records_are_saved_and_plans_without_one_stay_as_they_were(tmp_path: Path) -> None:
    for stages in (1, 2):
        plan = planned(mlp(), hardware="cpu-host", stages=stages)
        plan.save(tmp_path / "plan.json")
        again = autopar.load_plan(tmp_path / "plan.json")
        assert again == plan
        assert again.considered == plan.considered
        without = replace(plan, considered=())
        assert "considered" not in without.to_json()
        assert plan_from_json(without.to_json()) == without


@pytest.mark.slow
def test_the_cache_tells_plans_with_and_without_a_record_apart(tmp_path: Path) -> None:
    for options in ({"stages": 1}, {"stages": 2}, {}):
        own = {"hardware": "cpu-host", "cache": tmp_path, "num_microbatches": 1, **options}
        plain = planned(mlp(), everything=None, **own)
        plan = planned(mlp(), **own)
        assert not plain.considered
        assert plan.considered
        again = planned(mlp(), **own)
        assert again == plan
        assert planned(mlp(), everything=None, **own) == plain


def test_reports_show_the_table_with_reasons(tmp_path: Path) -> None:
    for stages in (1, "auto"):
        plan = planned(mlp(), hardware="cpu-host", stages=stages)
        explained = autopar.explain(plan)
        for text in (str(explained), explained.summary):
            assert "Considered, the chosen plan first" in text
            assert "slower: +" in text
        page = tmp_path / "report.html"
        autopar.write_report(plan, page)
        assert "Considered, the chosen plan first" in page.read_text()
        assert "slower: +" in page.read_text()


def test_a_long_table_shows_all_faster_rows() -> None:
    def row(seconds: float, reason: str) -> Considered:
        return Considered(step_time_s=seconds, peak_bytes=1.0, certainty="planned", reason=reason)

    faster = [row(0.01 * n, "does not fit") for n in range(1, 60)]
    slower = [row(2.0 + n, "slower") for n in range(60)]
    shown, left = considered_rows([row(1.0, ""), *faster, *slower])
    assert [one.row for one in shown[1:60]] == faster
    assert len(shown) + left == 120


def test_the_command_line_takes_it_and_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "target.py"
    target.write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef step(w, x):\n"
        "    loss = lambda w: jnp.square(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])).mean()\n"
        "    return [a - 0.1 * b for a, b in zip(w, jax.grad(loss)(w))]\n\n\n"
        "def make():\n    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)\n"
        "    return step, ([w, w], jax.ShapeDtypeStruct((32, 64), jnp.float32))\n"
    )
    out = tmp_path / "plan.json"
    command = ["plan", f"{target}:make", "--devices", "2", "--hardware", "cpu-host", "--no-cache"]
    assert main([*command, "--everything", "auto", "-o", str(out)]) == 0
    assert "Considered, the chosen plan first" in capsys.readouterr().out
    assert main(["explain", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["considered"]
    assert len(rows) == len(autopar.load_plan(out).considered)
    assert rows[0]["reason"] == ""
    assert all(row["reason"] for row in rows[1:])
    for command in (["verify", f"{target}:make"], ["why", "w/0", f"{target}:make"]):
        assert main([*command, "--plan", str(out), "--everything", "auto"]) != 0
        assert "is a saved plan, which fixes these options: drop --everything" in capsys.readouterr().err


@pytest.mark.slow
def test_verify_compiles_what_was_chosen() -> None:
    arguments = mlp().step, *mlp().abstract_args()
    for own, kind in (({"stages": 1}, Verification), ({"stages": 2}, StagesVerification)):
        found = autopar.verify(*arguments, everything="auto", num_devices=4, hardware="h100-sxm", **own)
        assert isinstance(found, kind)
        check_reasons(found.plan, load("h100-sxm").usable_bytes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hosts", [None, 2])
@pytest.mark.parametrize(
    "hardware", [{"hardware": "h100-sxm", "num_devices": 8}, {"hardware": {"h100-sxm": 8}}], ids=str
)
def test_verify_compiles_what_it_chose_and_plans_again(hardware: dict[str, Any], hosts: int | None) -> None:
    """The fake compiler reports first too much memory, then little. One device is the fastest for so small a step."""
    program = programs.mlp(batch=8, width=16, num_layers=2, optimizer="adam")
    too_large: Any = StandIn(peak_of(80e9), peak_of(1e6))
    result = autopar.verify(
        program.step,
        *program.abstract_args(),
        everything="auto",
        compiler=too_large,
        hosts=hosts,
        cache=False,
        **hardware,
    )
    assert len(result.attempts) == 2
    assert result.fits
    fits: Any = StandIn(peak_of(1e6))
    result = autopar.verify(
        program.step, *program.abstract_args(), everything="auto", compiler=fits, hosts=hosts, cache=False, **hardware
    )
    assert result.plan.considered[0].is_chosen
    check_reasons(result.plan, load("h100-sxm").usable_bytes)


def test_verify_takes_hosts_for_devices_of_one_kind() -> None:
    """The mesh is that of a stage, so `num_devices` are spread over the hosts."""
    assert _spread({"mesh": (2, 2), "num_devices": 8, "hardware": "h100-sxm"}, 2)["hardware"].devices_per_host == 4
    assert _spread({"mesh": (2, 4), "hardware": "h100-sxm"}, 2)["hardware"].devices_per_host == 4
    spread = _spread({"hardware": {"h100-sxm": 8}}, 4)
    assert (spread["hardware"].devices_per_host, spread["num_devices"]) == (2, 8)
    with pytest.raises(ClusterError, match="`hosts` spreads devices of one kind, but `hardware` names h100-sxm, a100"):
        _spread({"hardware": {"h100-sxm": 8, "a100-sxm-40": 8}}, 2)


def test_the_decorator_runs_what_it_chose() -> None:
    program = mlp()
    step = autopar.parallelize(everything="auto", hardware="cpu-host", cache=False)(program.step)
    state = step.init(program.create_state, jax.random.key(0), batch=program.make_batch(0))
    _, loss = step(state, program.make_batch(0))
    _, expected = jax.jit(program.step)(program.create_state(jax.random.key(0)), program.make_batch(0))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert step.latest_plan is not None
    assert step.latest_plan.considered
    assert "everything" in option_names()
