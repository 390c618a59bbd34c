"""A plan held against a compiled program: what is read from it, what counts as off, what users are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import jax
import numpy as np
import programs
import pytest
from test_hlo import MESH, PROGRAM
from test_plan import make_plan

import autopar
from autopar import absent
from autopar.absent import CompiledStep, read_times, target_text, topology_text
from autopar.cli import main
from autopar.compare import Figure, match_collectives, memory_figures, module_path, step_time_figure
from autopar.cost.hardware import load
from autopar.errors import HardwareError, MeshError, VerifyError
from autopar.mesh import MeshShape
from autopar.plan import CollectiveUse, Plan

# -- XLA's log -----------------------------------------------------------------------------


def test_the_log_gives_the_last_estimate_in_microseconds() -> None:
    log = "".join(
        f"I1121 04:39:54.019780 8060 latency_hiding_scheduler.cc:4496] {text}\n"
        for text in (
            "Wasted cycles for all-reduce: 99",
            "Total cycles: 999",
            "Wasted cycles for all-reduce: 30.5",
            "Wasted cycles for asynchronous call: 0",
            "Total cycles: 1.25e+03",
        )
    )
    total, exposed = read_times(log)
    assert total == pytest.approx(1.25e-3)
    assert exposed == pytest.approx({"all-reduce": 30.5e-6})
    assert read_times("nothing of the kind") == (None, {})


# -- matching ---------------------------------------------------------------------------------


def use(kind: str, axes: tuple[str, ...], num_bytes: float, *, combinable: bool = False) -> CollectiveUse:
    return CollectiveUse(
        kind=kind,
        axes=axes,
        num_bytes=num_bytes,
        time_s=1e-6,
        cause="sum the gradient",
        path="Dense_0",
        source="train.py:12",
        phase="backward",
        combinable=combinable,
    )


def plan_with(*uses: CollectiveUse) -> Plan:
    return replace(make_plan(), mesh=MESH, collectives=uses, decisions=())


def test_collectives_match_by_kind_and_axes_and_combined_ones_by_bytes() -> None:
    plan = plan_with(
        use("all-reduce", ("model",), 128 * 64 * 4, combinable=True),
        use("all-reduce", ("model",), 32 * 2, combinable=True),
        use("reduce-scatter", ("model", "data"), 128 * 64 * 4),
        use("collective-permute", ("data",), 12 * 64 * 8 * 4),
        use("all-to-all", ("data",), 128 * 4),
    )
    matches, strangers = match_collectives(plan, PROGRAM)
    assert [match.name for match in matches if not match.figure.holds] == []
    assert not strangers
    reduced = next(match for match in matches if match.kind == "all-reduce")
    assert (reduced.predicted_count, reduced.compiled_count, reduced.combinable) == (2, 1, 2)
    assert reduced.compiled_bytes == pytest.approx(2 * 3 / 4 * (128 * 64 * 4 + 32 * 2))
    assert reduced.causes == ("sum the gradient",)


def test_what_nobody_predicted_is_listed_with_its_place() -> None:
    plan = plan_with(
        use("reduce-scatter", ("data", "model"), 128 * 64 * 4), use("collective-permute", ("data",), 12 * 2048)
    )
    matches, strangers = match_collectives(plan, PROGRAM)
    (stranger,) = strangers  # the all-to-all sends 256 bytes, which are no matter
    assert (stranger.kind, stranger.axes) == ("all-reduce", ("model",))
    assert stranger.path == "jvp(MLP)/Dense_0/dot_general"
    assert stranger.source == "/home/me/train.py:12"
    assert [match.name for match in matches if not match.figure.holds] == ["all-reduce over model"]


def test_what_was_predicted_and_is_not_there_is_off() -> None:
    matches, strangers = match_collectives(
        plan_with(use("all-gather", ("data",), 1e6)), "ENTRY %main () -> f32[] {\n}\n"
    )
    assert [match.name for match in matches if not match.figure.holds] == ["all-gather over data"]
    assert not strangers


def test_an_axis_of_one_device_sends_nothing() -> None:
    plan = replace(plan_with(use("all-reduce", ("data",), 1e6)), mesh=MeshShape(("data", "model"), (1, 8)))
    assert match_collectives(plan, "") == ((), ())


def test_module_path_drops_the_jit_alone() -> None:
    assert module_path("jit(run)/jvp(GPT)/h_0/add") == "jvp(GPT)/h_0/add"
    assert module_path("") == ""


# -- tolerances -------------------------------------------------------------------------------


def test_a_figure_holds_within_its_tolerance_or_its_slack() -> None:
    assert Figure("peak", "bytes", 111.0, 100.0, 0.12).holds
    assert not Figure("peak", "bytes", 113.0, 100.0, 0.12).holds
    assert Figure("peak", "bytes", 113.0, 100.0, 0.12, slack=13.0).holds
    assert not Figure("peak", "bytes", 1.0, 0.0, 0.12).holds
    assert Figure("told", "bytes", 1.0, 100.0, None).holds
    assert Figure("step time", "s", 1.0, None, 0.2).holds
    assert Figure("peak", "bytes", 90.0, 100.0, 0.12).off == pytest.approx(-0.1)


def compiled_step(**changes: Any) -> CompiledStep:
    figures: dict[str, Any] = {
        "argument_bytes": 100e6,
        "temp_bytes": 50e6,
        "output_bytes": 80e6,
        "alias_bytes": 80e6,
        "step_time_s": 1e-3,
        "exposed_s": {},
        "compile_s": 1.0,
        "process_s": 2.0,
        "flags": absent.FLAGS,
        "hlo_text": "",
    }
    return CompiledStep(**(figures | changes))


def test_temporaries_are_told_and_the_peak_is_held() -> None:
    plan = make_plan()
    prediction = replace(
        plan.prediction, parameter_bytes=100e6, optimizer_bytes=0.0, data_bytes=0.0, activation_bytes=20e6
    )
    rows = {row.name: row for row in memory_figures(replace(plan, prediction=prediction), 100e6, compiled_step())}
    assert rows["arguments"].holds
    assert rows["temporaries"].holds
    assert rows["temporaries"].off == pytest.approx(-0.6)
    assert rows["peak"].compiled == 150e6
    assert not rows["peak"].holds


def test_the_step_time_is_held_where_the_estimate_can_be_believed() -> None:
    plan = make_plan()
    plan = replace(plan, prediction=replace(plan.prediction, step_time_s=1.3e-3))
    assert not step_time_figure(plan, compiled_step(), believable=True).holds
    assert step_time_figure(plan, compiled_step(), believable=False).holds


# -- what users are told ----------------------------------------------------------------------


def no_wheels(name: str) -> str:
    if name != "jaxlib":
        raise PackageNotFoundError(name)
    return "0.11.0"


def test_missing_wheels_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "version", no_wheels)
    with pytest.raises(VerifyError, match=r"pip install 'jax-cuda12-plugin==0\.11\.0'") as error:
        autopar.verify(lambda x: x, np.ones(8), mesh="8", hardware="h100-sxm")
    assert "which are not installed" in str(error.value)


def test_wheels_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jaxlib": "0.12.0", "jax-cuda12-plugin": "0.11.0", "jax-cuda12-pjrt": "0.11.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(absent, "version", version)
    with pytest.raises(VerifyError, match=r"jax-cuda12 is 0\.11\.0"):
        absent.require_wheels()


def test_a_cpu_profile_and_uneven_hosts_are_refused() -> None:
    with pytest.raises(HardwareError, match="no \\[xla_target\\]"):
        target_text(load("cpu-host"))
    with pytest.raises(MeshError, match="8 devices cannot be spread evenly over 3 hosts"):
        topology_text(8, 3)


def test_a_users_flags_are_kept_but_for_the_cpu_and_ours() -> None:
    text = "--xla_force_host_platform_device_count=8 --xla_gpu_autotune_level=4 --xla_gpu_all_reduce_combine_threshold_bytes=1"
    assert absent._own_flags(text) == ["--xla_gpu_all_reduce_combine_threshold_bytes=1"]


def test_every_gpu_profile_is_described_to_xla() -> None:
    text = target_text(load("h100-sxm"))
    assert 'platform_name: "CUDA"' in text
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "dnn_version_info { major: 9 minor: 10 patch: 0 }" in text


def test_the_command_exits_with_1_where_a_figure_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the compiler stood in for: it reports far more memory than the plan predicts."""
    target = tmp_path / "train_verify.py"
    target.write_text("def make():\n    import jax.numpy as jnp\n    return (lambda x: x * 2), (jnp.ones((8, 4)),)\n")
    asked: list[tuple[int, int]] = []

    def compile_absent(module: bytes, profile: object, num_devices: int, num_hosts: int) -> CompiledStep:
        assert module
        asked.append((num_devices, num_hosts))
        return compiled_step()

    verify = sys.modules["autopar.verify"]
    monkeypatch.setattr(verify, "compile_absent", compile_absent)
    monkeypatch.setattr(verify, "require_wheels", lambda: None)
    arguments = [f"{target}:make", "--mesh", "2", "--hardware", "h100-sxm"]
    assert main(["verify", *arguments, "--hosts", "2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert asked == [(2, 2)]
    assert document["topology"] == "1x2x1"
    assert not document["holds"]
    assert "peak" in document["off"]
    assert main(["verify", *arguments]) == 1
    assert "off: arguments" in capsys.readouterr().out


def test_a_saved_plan_takes_no_planning_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    make_plan().save(path)
    assert main(["verify", "train.py:make", "--plan", str(path), "--mesh", "2x4"]) == 2
    assert "drop --mesh" in capsys.readouterr().err


# -- the real thing ---------------------------------------------------------------------------


def two_layers() -> programs.Program:
    return programs.mlp(batch=4096, width=1024, num_layers=2)


def need_wheels() -> None:
    """Skips where the wheels are absent, and says how to get them."""
    try:
        absent.require_wheels()
    except VerifyError as error:
        if os.environ.get("CI"):
            pytest.fail(f"in CI XLA's GPU compiler must be here: {error}")
        pytest.skip(f"XLA's GPU compiler is not here: {error}")


@pytest.mark.slow
def test_a_two_layer_mlp_under_eight_gpus_that_are_not_there() -> None:
    need_wheels()
    told = autopar.verify(two_layers().step, *two_layers().abstract_args(), mesh="8", hardware="h100-sxm")
    rows = {row.name: row for row in told.memory}
    assert [name for name in ("arguments", "outputs", "shared by both") if not rows[name].holds] == []
    assert told.collectives
    assert [match.name for match in told.collectives if not match.figure.holds] == []
    assert not told.unpredicted
    assert told.step_time.compiled is not None
    assert 0 < told.step_time.compiled < 1
    assert "Verification of" in str(told)
    assert json.loads(json.dumps(told.to_json()))["topology"] == "1x1x8"


@pytest.mark.slow
def test_the_command_says_nothing_of_the_plugin(tmp_path: Path) -> None:
    """A saved plan of a target, in a process as a user's: the report, and no complaint of a missing GPU."""
    need_wheels()
    root = Path(__file__).resolve().parent.parent
    (tmp_path / "t.py").write_text(
        "import jax, programs\np = programs.mlp(batch=4096, width=1024, num_layers=2)\n"
        "def make():\n    return p.step, p.abstract_args()\n"
    )
    plan = autopar.plan(two_layers().step, *two_layers().abstract_args(), mesh="8", hardware="h100-sxm")
    plan.save(tmp_path / "p.json")
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
    command = [sys.executable, "-m", "autopar", "verify", "t.py:make", "--plan", "p.json", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    assert document["collectives"]
    assert done.stderr == ""


def test_xla_s_refusal_is_quoted() -> None:
    need_wheels()
    with pytest.raises(VerifyError, match="XLA could not compile the planned step"):
        absent.compile_absent(b"no module", load("h100-sxm"), 8, 1)


def test_lowering_needs_no_device() -> None:
    """What travels to the compiler's process: bytecode that names modules, made under an abstract mesh."""
    program = two_layers()
    plan, traced = autopar.parallelize(mesh="2x8", hardware="h100-sxm")(program.step).planned(*program.abstract_args())
    from autopar import execute, jax_compat

    jitted = execute.jit_plan(plan, traced.trace, execute.abstract_mesh(plan.mesh))
    module = jax_compat.module_bytes(execute.lower_for("cuda", jitted, program.abstract_args()))
    assert len(jax.devices()) < plan.mesh.num_devices
    assert b"Dense_0" in module
