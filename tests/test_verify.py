"""Verification: parsed estimates, matched collectives, tolerances, reports, replanning, real compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P
from test_hlo import MESH, PROGRAM
from test_plan import make_plan

import autopar
from autopar.cli.main import main
from autopar.errors import HardwareError, MeshError, VerifyError
from autopar.hardware.profile import load
from autopar.ir.mesh import MeshShape
from autopar.jax_interop.compilation import module_bytes
from autopar.plans.plan import Plan
from autopar.plans.records import CollectiveUse
from autopar.verification.attribution import Pairing, describe_origin, module_paths, pair
from autopar.verification.figures import Collectives, Figure, match_collectives, memory_figures, step_time_figure
from autopar.verification.step_times import step_times
from autopar.verification.verification import Verification
from autopar.xla_compiler import compiler
from autopar.xla_compiler import gpu_target as absent
from autopar.xla_compiler.compiler import CompiledStep, Compiler, read_times
from autopar.xla_compiler.gpu_target import target_text, topology_text
from autopar.xla_compiler.hlo_collectives import Collective, collectives
from autopar.xla_compiler.hlo_text import parse_module

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
        cause="reduce the gradient",
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
    found = match_collectives(plan, PROGRAM)
    matches = found.matches
    assert [match.name for match in matches if not match.figure.holds] == []
    assert not found.unpredicted
    assert not found.missing
    assert {one.kind: one.predicted for one in found.compiled} == {
        "all-reduce": (0, 1),
        "reduce-scatter": (2,),
        "collective-permute": (3,),
        "all-to-all": (4,),
    }
    reduced = next(match for match in matches if match.kind == "all-reduce")
    assert (reduced.predicted_count, reduced.compiled_count, reduced.combinable) == (2, 1, 2)
    assert reduced.compiled_bytes == pytest.approx(2 * 3 / 4 * (128 * 64 * 4 + 32 * 2))
    assert reduced.causes == ("reduce the gradient",)


def test_unpredicted_collectives_are_listed_with_their_source() -> None:
    plan = plan_with(
        use("reduce-scatter", ("data", "model"), 128 * 64 * 4), use("collective-permute", ("data",), 12 * 2048)
    )
    found = match_collectives(plan, PROGRAM, hosts=(0, 0, 0, 0, 1, 1, 1, 1))
    matches = found.matches
    (extra,) = found.unpredicted  # the all-to-all sends 256 bytes, below the slack
    assert (extra.kind, extra.axes) == ("all-reduce", ("model",))
    assert extra.path == "jvp(MLP)/Dense_0/dot_general"
    assert extra.source == "/home/me/train.py:12"
    assert [match.name for match in matches if not match.figure.holds] == ["all-reduce over model"]
    assert {match.name for match in matches if match.crosses_hosts} == {
        "reduce-scatter over data, model",
        "collective-permute over data",
        "all-to-all over data",
    }


def test_missing_predicted_collectives_are_out_of_tolerance() -> None:
    found = match_collectives(plan_with(use("all-gather", ("data",), 1e6)), "ENTRY %main () -> f32[] {\n}\n")
    assert [match.name for match in found.matches if not match.figure.holds] == ["all-gather over data"]
    assert not found.unpredicted
    assert found.missing == ((0, pytest.approx(0.5e6)),)


def test_an_axis_of_one_device_sends_nothing() -> None:
    plan = replace(plan_with(use("all-reduce", ("data",), 1e6)), mesh=MeshShape(("data", "model"), (1, 8)))
    assert match_collectives(plan, "") == Collectives((), (), ())


# -- pairing ----------------------------------------------------------------------------------


def reduced(name: str, *sizes: float, op_name: str = "", concatenated: tuple[float, ...] = ()) -> Collective:
    return Collective("all-reduce", name, op_name, "", "", ((0, 1),), ("f32",), 1, sizes, 1, concatenated)


def paired(found: list[Collective], uses: list[CollectiveUse]) -> Pairing:
    return pair(found, list(enumerate(uses)), 2)


def at(path: str, num_bytes: float) -> CollectiveUse:
    return replace(use("all-reduce", ("data",), num_bytes), path=path)


def test_bytes_decide_and_paths_break_ties() -> None:
    found = [
        reduced("first", 4e6, op_name="jit(run)/transpose(jvp(M))/b/dot_general"),
        reduced("second", 4e6, op_name="jit(run)/transpose(jvp(M))/a/dot_general"),
        reduced("third", 8e6, op_name="jit(run)/transpose(jvp(M))/a/dot_general"),
    ]
    result = paired(found, [at("M/a", 4e6), at("M/b", 4e6), at("M/elsewhere", 8e6)])
    assert result.predicted == {0: (1,), 1: (0,), 2: (2,)}
    assert not result.compiled_left
    assert not result.predicted_left


def test_an_input_in_op_name_matches_the_input_in_a_cause() -> None:
    """A parameter is gathered before any module uses it, so XLA's op_name is the argument."""
    found = [reduced(name, 4e6, op_name=f"args[0].params[\\'{name}\\'][\\'kernel\\']") for name in ("b", "a")]
    uses = [replace(at(f"M/{n}", 4e6), cause=f"gather `state/params/{n}/kernel` for use") for n in ("a", "b")]
    assert paired(found, uses).predicted == {0: (1,), 1: (0,)}


def test_a_concatenated_collective_matches_all_its_parts() -> None:
    """The parts of one are known; the other is opaque, and its total has a little padding."""
    merged = "jit(run)/transpose(jvp(M))/(a/dot_general:b/dot_general)"
    found = [reduced("concatenated", 6e6, op_name=merged, concatenated=(2e6, 4e6)), reduced("opaque", 10.05e6)]
    result = paired(found, [at("M/a", 2e6), at("M/c", 3e6), at("M/b", 4e6), at("M/d", 7e6), at("M/none", 5e6)])
    assert result.predicted == {0: (0, 2), 1: (1, 3)}
    assert not result.compiled_left
    assert result.predicted_left == {4: 5e6}


def test_one_prediction_may_be_compiled_as_several() -> None:
    result = paired([reduced("a", 3e6), reduced("b", 5e6), reduced("c", 1e3)], [at("M", 8e6)])
    assert result.predicted == {0: (0,), 1: (0,)}
    assert result.compiled_left == {2: 1e3}
    assert not result.predicted_left


def test_the_parts_of_a_concatenation_are_read() -> None:
    text = """\
%joined (p0: f32[8], p1: f32[24]) -> f32[32] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[24]{0} parameter(1)
  ROOT %concatenate.1 = f32[32]{0} concatenate(%p0, %p1), dimensions={0}
}

ENTRY %main (a: f32[8], b: f32[24]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %b = f32[24]{0} parameter(1)
  %wrapped = f32[32]{0} fusion(%a, %b), kind=kLoop, calls=%joined
  ROOT %r = f32[32]{0} all-reduce(%wrapped), replica_groups={{0,1}}, to_apply=%add
}
"""
    (one,) = collectives(text, ignore_up_to=0)
    assert one.concatenated_bytes == one.parts(2) == (32.0, 96.0)
    assert one.payloads(2) == (128.0,)
    text = text.replace(
        "ENTRY",
        "%async (p: f32[32]) -> f32[32] {\n  %p = f32[32]{0} parameter(0)\n"
        "  ROOT %r = f32[32]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add\n}\n\nENTRY",
    ).replace(
        "  ROOT %r = f32[32]{0} all-reduce(%wrapped), replica_groups={{0,1}}, to_apply=%add\n}\n",
        "  %s = ((f32[32]{0}), f32[32]{0}) async-start(%wrapped), calls=%async\n"
        "  ROOT %d = f32[32]{0} async-done(%s)\n}\n",
    )
    (one,) = collectives(text, ignore_up_to=0)
    assert one.concatenated_bytes == (32.0, 96.0)


def test_origins_are_named_as_a_plan_names_modules() -> None:
    assert module_paths("jit(run)/jvp(GPT)/h_0/add") == ("GPT/h_0",)
    assert module_paths("jit(run)/(transpose(jvp(M))/a/add:transpose(jvp(M))/b/add)") == ("M/a", "M/b")
    assert module_paths("jit(run)/M/(a/add:b/ad") == ("M/a", "M/b")  # cut off
    assert module_paths("") == ("",)
    assert describe_origin("jit(run)/jvp(GPT)/h_0/add") == "jvp(GPT)/h_0/add"
    assert describe_origin("") == ""


# -- tolerances -------------------------------------------------------------------------------


def test_a_figure_holds_within_its_tolerance_or_its_slack() -> None:
    assert Figure("peak", "bytes", 111.0, 100.0, 0.12).holds
    assert not Figure("peak", "bytes", 113.0, 100.0, 0.12).holds
    assert Figure("peak", "bytes", 113.0, 100.0, 0.12, slack=13.0).holds
    assert not Figure("peak", "bytes", 1.0, 0.0, 0.12).holds
    assert Figure("result", "bytes", 1.0, 100.0, None).holds
    assert Figure("step time", "s", 1.0, None, 0.2).holds
    assert Figure("peak", "bytes", 90.0, 100.0, 0.12).off == pytest.approx(-0.1)


HLO = """\
HloModule m, is_scheduled=true, num_partitions=8

%fused (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  ROOT %e = f32[1024,1024]{1,0} exponential(%p)
}

ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  ROOT %f = f32[1024,1024]{1,0} fusion(%a), kind=kLoop, calls=%fused
}
"""


def compiled_step(**changes: Any) -> CompiledStep:
    figures: dict[str, Any] = {
        "argument_bytes": 100e6,
        "temp_bytes": 50e6,
        "output_bytes": 80e6,
        "alias_bytes": 80e6,
        "hosts": (0,) * 8,
        "step_time_s": 1e-3,
        "exposed_s": {},
        "compile_s": 0.0,
        "flags": compiler.FLAGS,
        "hlo_text": HLO,
    }
    return CompiledStep(**(figures | changes))


def test_temporaries_are_reported_and_the_peak_is_checked() -> None:
    plan = make_plan()
    prediction = replace(
        plan.prediction, parameter_bytes=100e6, optimizer_bytes=0.0, data_bytes=0.0, temporary_bytes=20e6
    )
    rows = {row.name: row for row in memory_figures(replace(plan, prediction=prediction), 100e6, compiled_step())}
    assert rows["arguments"].holds
    assert rows["temporaries"].holds
    assert rows["temporaries"].off == pytest.approx(-0.6)
    assert rows["peak"].compiled == 150e6
    assert not rows["peak"].holds


def test_the_step_time_is_checked_where_the_estimate_is_reliable() -> None:
    plan = make_plan()
    plan = replace(plan, prediction=replace(plan.prediction, step_time_s=1.3e-3))
    times = step_times(plan, compiled_step(), parse_module(HLO), "h100-sxm", 8)
    assert not step_time_figure(plan, times, believable=True).holds
    assert step_time_figure(plan, times, believable=False).holds
    unmeasured = step_times(plan, compiled_step(), parse_module(HLO), "h100-sxm", 8, has_tables=False)
    assert unmeasured.estimate_errors == ("a GPU without measured tables",) and unmeasured.sound_xla_s is None
    wrong = replace(times, estimate_errors=("a loop",))
    figure = step_time_figure(plan, wrong, believable=True)
    assert (figure.compiled, figure.holds) == (None, True)
    # The simulation shares the estimate's other errors, so the two are still compared.
    simulated = replace(plan, prediction=replace(plan.prediction, xla_step_time_s=2.5e-3))
    assert (
        step_time_figure(simulated, replace(times, estimate_errors=("a convolution",)), believable=True).compiled
        == 1e-3
    )


def verification(plan: autopar.Plan, hardware: str = "h100-sxm") -> Verification:
    times = step_times(plan, compiled_step(), parse_module(HLO), hardware, 8)
    return Verification(
        plan=plan,
        topology="1x1x8",
        memory=(),
        matched=Collectives((), (), ()),
        times=times,
        step_time=step_time_figure(plan, times, believable=True),
        compiled=compiled_step(),
        budget_bytes=1e12,
        attempts=(),
        overhead_s=0.0,
    )


def test_the_step_time_has_one_column_per_model() -> None:
    plan = make_plan()
    result = verification(plan)
    lines = str(result).splitlines()
    start = lines.index("Step time")
    assert lines[start + 1].split("  ")[-3:] != [] and "measured" not in lines[start + 1]
    cells = [cell.strip() for cell in lines[start + 1].split("  ") if cell.strip()]
    assert cells == ["predicted", "replayed", "XLA's estimate"]
    cells = [cell.strip() for cell in lines[start + 2].split("  ") if cell.strip()]
    assert cells[:2] == ["step time", "2.60 ms"]
    assert cells[3] == "1.00 ms"
    assert "XLA's estimate, simulated: 2.50 ms, 1.00 ms by XLA (+150.0 %, tolerance 20 %): OFF" in str(result)
    document = result.to_json()
    assert document["predicted_step_time_s"] == 2.6e-3
    assert document["step_times"]["predicted"]["step_time_s"] == 2.6e-3
    assert document["step_times"]["replayed"]["step_time_s"] > 0
    assert document["step_times"]["XLA's estimate"]["step_time_s"] == 1e-3
    for text in (str(result), str(autopar.explain(plan))):
        assert "2.60 ms" in text and "2.50 ms" in text
    unknown = replace(plan, prediction=replace(plan.prediction, xla_step_time_s=None, xla_exposed_s=None))
    assert verification(unknown).step_time.name == "predicted step time"
    assert "simulated" not in str(verification(unknown))


def test_a_wrong_estimate_is_left_out_and_a_device_without_rates_is_not_replayed() -> None:
    result = verification(make_plan())
    looped = replace(result, times=replace(result.times, estimate_errors=("a loop", "a convolution")))
    assert looped.times.sound_xla_s is None
    assert "XLA's estimate: left out, it is wrong for a loop and a convolution" in str(looped)
    assert looped.to_json()["step_times"]["XLA's estimate"] is None
    unknown = verification(make_plan(), hardware="abacus")
    assert unknown.times.replay is None
    assert "not replayed: no replay rates for 'abacus'" in str(unknown)


# -- messages ---------------------------------------------------------------------------------


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
    with pytest.raises(MeshError, match="8 devices do not divide evenly among 3 hosts"):
        topology_text(load("h100-sxm"), 8, 3)


def test_nothing_is_fused_into_a_matmul_without_a_tiling(absent_gpus: Compiler) -> None:
    """Triton has no tile over rows of 8 x 80 tokens that a transpose takes apart; all other matmuls are Triton's all the same."""

    def experts(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
        for layer in range(2):
            with jax.named_scope(f"layer_{layer}"):
                x = jnp.transpose(x, (1, 0, 2, 3, 4)).reshape(4, -1, 768)
                x = jnp.tanh(jnp.einsum("xim,xmn->xin", x, w)).reshape(4, 8, 8, 80, 768).swapaxes(0, 1)
        return x.reshape(-1, 768) @ table

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4, 8, 80, 768), (4, 768, 768), (768, 50257))]
    module = module_bytes(jax.jit(experts).trace(*args).lower(lowering_platforms=("cuda",)))
    compiled = absent_gpus.compile(module, load("h100-sxm"), 1, 1)
    assert "cublas" not in compiled.hlo_text and "transpose(" in compiled.hlo_text
    assert not any("triton_gemm" in flag for flag in compiled.flags)


def test_user_flags_are_kept_except_cpu_flags_and_our_own() -> None:
    text = "--xla_force_host_platform_device_count=8 --xla_gpu_autotune_level=4 --xla_gpu_all_reduce_combine_threshold_bytes=1"
    assert compiler.own_flags(text) == ["--xla_gpu_all_reduce_combine_threshold_bytes=1"]


def test_every_gpu_profile_is_described_to_xla() -> None:
    text = target_text(load("h100-sxm"))
    assert 'platform_name: "CUDA"' in text
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "dnn_version_info { major: 9 minor: 10 patch: 0 }" in text


class StandIn:
    """A fake compiler that returns given steps in order."""

    def __init__(self, *steps: CompiledStep) -> None:
        self.steps = list(steps)
        self.compiled_for: list[tuple[int, int]] = []
        self.closed = 0

    def compile(self, module: bytes, profile: object, num_devices: int, num_hosts: int, **_: object) -> CompiledStep:
        assert module
        self.compiled_for.append((num_devices, num_hosts))
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed += 1


TARGET = "def make():\n    import jax.numpy as jnp\n    return (lambda x: x * 2), (jnp.ones((8, 4)),)\n"


def test_the_command_exits_with_1_where_a_figure_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A fake compiler reports far more memory than the plan predicts."""
    target, output = tmp_path / "train_verify.py", tmp_path / "out.json"
    target.write_text(TARGET)
    standin = StandIn(compiled_step())
    monkeypatch.setattr(compiler, "Compiler", lambda: standin)
    arguments = [f"{target}:make", "--mesh", "2", "--hardware", "h100-sxm"]
    assert main(["verify", *arguments, "--hosts", "2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert standin.compiled_for == [(2, 2)]
    assert standin.closed == 1
    assert document["topology"] == "2x1x1"
    assert not document["holds"]
    assert "peak" in document["off"]
    assert document["memory_budget"]["holds"]
    assert 0 <= document["overhead_s"] < 60
    assert main(["verify", *arguments, "-o", str(output)]) == 1
    printed = capsys.readouterr().out
    assert "off: arguments" in printed
    assert f"saved to {output}" in printed
    assert autopar.load_plan(output).num_devices == 2
    assert main(["verify", *arguments, "-o", str(tmp_path)]) == 2


def test_an_error_in_the_target_ends_the_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    standin = StandIn(compiled_step())
    monkeypatch.setattr(compiler, "Compiler", lambda: standin)
    assert main(["verify", f"{tmp_path}/none.py:make", "--mesh", "2", "--hardware", "h100-sxm"]) == 2
    assert standin.closed == 1


# -- the memory budget ------------------------------------------------------------------------


def adam() -> programs.Program:
    return programs.mlp(batch=32, width=256, num_layers=4, optimizer="adam")


def peak_of(num_bytes: float) -> CompiledStep:
    return compiled_step(argument_bytes=0.0, temp_bytes=num_bytes, output_bytes=0.0, alias_bytes=0.0)


def test_a_plan_over_the_budget_is_replanned() -> None:
    """The fake compiler first reports a fifth more memory than the budget, then less."""
    pinned = {"state/*": jax.sharding.PartitionSpec()}
    program = adam()
    whole = autopar.plan(program.step, *program.abstract_args(), mesh="8", hardware="h100-sxm", pin=pinned)
    budget = 0.8 * whole.prediction.peak_bytes
    standin: Any = StandIn(peak_of(1.2 * budget), peak_of(0.9 * budget))
    result = autopar.verify(
        program.step,
        *program.abstract_args(),
        mesh="8",
        hardware="h100-sxm",
        memory_budget_bytes=budget,
        rematerialize=False,  # with rematerialization no plan would need less memory
        compiler=standin,
    )
    first, second = result.attempts
    assert result.fits
    assert first.predicted_bytes is not None and first.predicted_bytes <= 0.95 * budget
    assert second.planned_for_bytes == pytest.approx(0.95 * first.predicted_bytes / 1.2)
    assert second.predicted_bytes is not None and second.predicted_bytes <= second.planned_for_bytes
    assert result.plan.prediction.peak_bytes == second.predicted_bytes
    assert result.plan.memory_budget_bytes == budget
    assert "planned for" in result.plan.notes[-1]
    assert "attempt" in str(result)
    assert len(result.to_json()["memory_budget"]["attempts"]) == 2


def test_replanning_stops_after_two_attempts() -> None:
    program = adam()
    standin: Any = StandIn(peak_of(80e9), peak_of(75e9), peak_of(78e9))
    result = autopar.verify(program.step, *program.abstract_args(), mesh="8", hardware="h100-sxm", compiler=standin)
    assert not result.fits
    assert "memory budget" in result.off
    assert len(result.attempts) in (2, 3)
    if result.attempts[-1].predicted_bytes is None:
        assert "no plan on mesh 8 fits" in result.attempts[-1].description
    assert result.compiled.peak_bytes == min(one.compiled_bytes or 1e12 for one in result.attempts)
    assert "over the memory budget of 63.7 GB" in str(result)


def test_a_given_plan_is_not_replanned() -> None:
    program = adam()
    plan = autopar.plan(program.step, *program.abstract_args(), mesh="8", hardware="h100-sxm")
    standin: Any = StandIn(peak_of(80e9))
    result = autopar.verify(program.step, *program.abstract_args(), plan=plan, compiler=standin)
    assert result.plan.decisions == plan.decisions
    assert len(result.attempts) == 1
    assert not result.fits
    assert "plan again with a budget of" in " ".join(str(result).split())


def test_hosts_determine_the_devices_per_host() -> None:
    """Collectives over eight GPUs on two hosts are priced as crossing the network."""
    program = two_layers()
    standin: Any = StandIn(compiled_step())
    options: dict[str, Any] = {"mesh": "8", "hardware": "h100-sxm", "compiler": standin}
    one = autopar.verify(program.step, *program.abstract_args(), **options)
    two = autopar.verify(program.step, *program.abstract_args(), hosts=2, **options)
    assert (one.topology, two.topology) == ("1x1x8", "2x1x4")
    assert two.plan.prediction.step_time_s > one.plan.prediction.step_time_s
    decorated = autopar.parallelize(mesh="8", hardware="h100-sxm")(program.step)
    same = autopar.verify(decorated, *program.abstract_args(), hosts=2, compiler=standin)
    assert same.plan.prediction == two.plan.prediction
    with pytest.raises(MeshError, match="among 3 hosts"):
        autopar.verify(program.step, *program.abstract_args(), hosts=3, **options)


def test_a_saved_plan_takes_no_planning_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    make_plan().save(path)
    assert main(["verify", "train.py:make", "--plan", str(path), "--mesh", "2x4"]) == 2
    assert "drop --mesh" in capsys.readouterr().err


# -- local devices ----------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel", [P("data", "model"), P("model", None), P(None, "data")])
def test_state_split_over_two_axes_sends_what_is_predicted(kernel: P, absent_gpus: Compiler) -> None:
    """Unreduced gradients are reduce-scattered dim by dim over both axes, and kernels gathered likewise."""
    program = programs.mlp(batch=4096, width=1024, num_layers=3, optimizer="adam")
    pins = {"state/*/kernel": kernel, "batch/*": P(("data", "model"))}
    result = autopar.verify(
        program.step, *program.abstract_args(), mesh="2x4", hardware="h100-sxm", pin=pins, compiler=absent_gpus
    )
    assert all(match.figure.holds for match in result.collectives), str(result)
    assert sum(match.compiled_bytes for match in result.collectives) > 1e7


def test_small_operands_do_not_split_what_they_scale(absent_gpus: Compiler) -> None:
    """A mask of 12 heads is sliced from one that is split over hosts; the scores are split by batch."""

    def masked(mask: jax.Array, scores: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("bhqk,h->bhqk", jax.nn.softmax(scores), mask[0])) + 1.0

    args = jax.ShapeDtypeStruct((12, 12), jnp.float32), jax.ShapeDtypeStruct((8, 12, 256, 256), jnp.float32)
    pins = {"mask": P(None, "data"), "scores": P("model")}
    result = autopar.verify(masked, *args, mesh="2x4", hardware="h100-sxm", pin=pins, compiler=absent_gpus)
    assert all(match.figure.holds for match in result.collectives), str(result)


def test_a_reduction_with_several_users_is_a_reduce_scatter_and_an_all_reduce(absent_gpus: Compiler) -> None:
    """The gradient of a position table: unreduced over both axes, used by two optimizer moments that are sharded over
    one. XLA makes two collectives of it only next to others over the same devices, such as a weight's gradient."""

    def step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        def loss(table: jax.Array, weights: jax.Array) -> jax.Array:
            return jnp.sum(jnp.square(jnp.tanh(batch + table) @ weights))

        gradient, slope = jax.grad(loss, argnums=(0, 1))(state["table"], state["weights"])
        return {
            "table": state["table"] - state["mean"],
            "mean": 0.9 * state["mean"] + gradient,
            "square": 0.9 * state["square"] + gradient * gradient,
            "weights": state["weights"] - slope,
        }

    table, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 512, 1024), (1024, 1024)))
    state = {"table": table, "mean": table, "square": table, "weights": weights}
    rows = dict.fromkeys(("state/table", "state/mean", "state/square"), P(None, None, "model"))
    pins = {**rows, "state/weights": P("model"), "batch": P(("data", "model"))}
    batch = jax.ShapeDtypeStruct((64, 512, 1024), jnp.float32)
    result = autopar.verify(step, state, batch, mesh="2x4", hardware="h100-sxm", pin=pins, compiler=absent_gpus)
    assert {one.kind for one in result.plan.collectives} >= {"reduce-scatter", "all-reduce"}, str(result)
    assert all(match.figure.holds for match in result.collectives), str(result)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_a_small_all_reduce_over_more_gpus_than_the_one_shot_kernel_supports() -> None:
    def step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def loss_of(weights: jax.Array) -> jax.Array:
            counted = batch["y"] > 0
            rows = jnp.sum(jnp.tanh(batch["x"] @ weights), -1)
            return jnp.sum(jnp.where(counted, rows, 0.0)) / jnp.sum(counted.astype(jnp.int32))

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return weights - 0.1 * gradient, loss

    shapes = {"x": jax.ShapeDtypeStruct((4096, 256), jnp.float32), "y": jax.ShapeDtypeStruct((4096,), jnp.int32)}
    result = autopar.verify(
        step,
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
        shapes,
        mesh="64",
        hardware="h100-sxm",
        pin={"batch/*": P("data")},
    )
    assert any(one.kind == "all-reduce" and one.num_bytes <= 8 for one in result.matched.compiled), str(result)


@pytest.mark.usefixtures("gpu_compiler")
def test_local_devices_compile_and_run_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices in place of GPUs: the same worker and messages; carried state is fed back."""
    from autopar.jax_interop import compilation
    from autopar.runtime import jit as execute
    from autopar.verification.compile_plan import _arguments

    monkeypatch.setattr(compiler, "own_flags", lambda text: ["--xla_force_host_platform_device_count=4"])
    program = programs.mlp(batch=64, width=64, num_layers=2, optimizer="adam")
    step = autopar.parallelize(mesh="2x2", hardware="cpu-host")(program.step)
    plan, traced = step.planned(*program.abstract_args())
    jitted = execute.jit_plan(plan, traced.trace, execute.abstract_mesh(plan.mesh))
    lowered = execute.lower_for("cpu", jitted, program.abstract_args())
    arguments = _arguments(plan, traced, compilation.kept_inputs(lowered))
    with Compiler(platform="cpu") as process:
        made = process.compile(compilation.module_bytes(lowered), load("cpu-host"), 4, 1, arguments)
        assert process.flags[-3:-1] == compiler.SCHEDULER_FLAGS
    assert made.measured is not None
    assert len(made.measured.runs_s) >= 3
    assert min(made.measured.runs_s) <= made.measured.step_time_s <= max(made.measured.runs_s)
    assert made.measured.peak_bytes is None  # a CPU does not say
    assert made.argument_bytes == pytest.approx(
        sum(t.num_bytes for i, t in enumerate(plan.inputs) if i in compilation.kept_inputs(lowered)), rel=0.01
    )
    assert "HloModule" in made.hlo_text


@pytest.mark.usefixtures("gpu_compiler")
def test_local_devices_of_another_kind_are_ignored() -> None:
    """On a CPU instead of H100s the compiler compiles for absent GPUs, and a run is an error."""
    with Compiler(platform="cpu") as process:
        assert not process.is_present(load("h100-sxm"), 8, 1)
        assert process.flags[-5:-1] == compiler.FLAGS
        nothing: Any = object()
        with pytest.raises(VerifyError, match=r"needs 8 'NVIDIA H100 80GB HBM3' on this machine.*of kind 'cpu'"):
            process.compile(b"", load("h100-sxm"), 8, 1, nothing)


@pytest.mark.usefixtures("gpu_compiler")
def test_run_without_gpus_fails_before_planning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "train_run.py"
    target.write_text(TARGET)
    monkeypatch.setattr(compiler, "_platform_here", lambda: None)
    assert main(["verify", f"{target}:make", "--mesh", "2", "--hardware", "h100-sxm", "--run"]) == 2
    assert "running the step needs GPUs on this machine" in capsys.readouterr().err


def test_gpus_are_detected_unless_the_environment_excludes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert compiler._platform_here() == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compiler._platform_here() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert compiler._platform_here() is None


def test_measured_figures_are_a_third_column() -> None:
    ran = compiler.Measured(step_time_s=2e-3, runs_s=(2e-3,) * 3, peak_bytes=140e6)
    program = adam()
    standin: Any = StandIn(compiled_step(measured=ran))
    result = autopar.verify(program.step, *program.abstract_args(), mesh="8", hardware="h100-sxm", compiler=standin)
    assert "measured" in str(result)
    assert "140 MB" in str(result)
    assert result.to_json()["measured"]["step_time_s"] == 2e-3
    assert result.step_time.measured == 2e-3


# -- with XLA's GPU compiler ------------------------------------------------------------------


def two_layers() -> programs.Program:
    return programs.mlp(batch=4096, width=1024, num_layers=2)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_a_two_layer_mlp_on_eight_absent_gpus(tmp_path: Path) -> None:
    result = autopar.verify(two_layers().step, *two_layers().abstract_args(), mesh="8", hardware="h100-sxm")
    rows = {row.name: row for row in result.memory}
    assert [name for name in ("arguments", "outputs", "shared by both") if not rows[name].holds] == []
    assert result.collectives
    assert [match.name for match in result.collectives if not match.figure.holds] == []
    assert not result.unpredicted
    assert result.step_time.compiled is not None
    assert 0 < result.step_time.compiled < 1
    assert 0 < result.overhead_s < 10  # about a second on an idle machine
    assert "Verification of" in str(result)
    assert json.loads(json.dumps(result.to_json()))["topology"] == "1x1x8"
    autopar.write_report(result.plan, tmp_path / "report.html", verification=result)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Predicted against compiled" in page and ">replayed<" in page and "XLA's own program for 1x1x8 GPUs" in page


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_two_hosts_have_the_device_order_of_the_mesh() -> None:
    """16 GPUs on 2 hosts: the first mesh axis spans the hosts, also in XLA's replica groups."""
    program = two_layers()
    result = autopar.verify(
        program.step,
        *program.abstract_args(),
        mesh="host=2,gpu=8",
        hosts=2,
        hardware="h100-sxm",
        pin={"batch/*": P(("host", "gpu"))},
    )
    assert result.topology == "2x1x8"
    assert result.compiled.hosts == (0,) * 8 + (1,) * 8
    assert [match.name for match in result.collectives if match.axes is None] == []
    compiled = [match for match in result.collectives if match.compiled_count]
    assert any(match.crosses_hosts for match in compiled)
    for match in compiled:
        assert match.crosses_hosts == ("host" in (match.axes or ())), match.name
    assert [match.name for match in result.collectives if not match.figure.holds] == []


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_the_command_prints_no_message_of_the_plugin(tmp_path: Path) -> None:
    """The command in a process of its own prints the report, and no warning of a missing GPU."""
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


@pytest.mark.usefixtures("gpu_compiler")
def test_an_error_of_xla_is_quoted() -> None:
    with Compiler() as process, pytest.raises(VerifyError, match="XLA could not compile the planned step"):
        process.compile(b"no module", load("h100-sxm"), 8, 1)
    assert process._child.poll() is not None
    assert not Path(process._folder.name).exists()


@pytest.mark.usefixtures("gpu_compiler")
def test_an_early_death_of_the_compiler_is_reported() -> None:
    with Compiler() as process:
        process._child.kill()
        process._child.wait()
        with pytest.raises(VerifyError, match=r"exit code -9"):
            process.compile(b"no module", load("h100-sxm"), 8, 1)


@pytest.mark.usefixtures("gpu_compiler")
def test_an_interrupt_while_compiling_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:

    def interrupt(self: Compiler, job: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Compiler, "_done", interrupt)
    with pytest.raises(KeyboardInterrupt), Compiler() as process:
        process.compile(b"no module", load("h100-sxm"), 8, 1)
    assert process._child.poll() is not None


@pytest.mark.usefixtures("gpu_compiler")
def test_the_compiler_ends_with_its_parent(tmp_path: Path) -> None:
    """A killed parent cannot end its compiler, which sees the end of its input and cleans up."""
    code = (
        "import os, sys, time\nfrom autopar.xla_compiler.compiler import Compiler\nc = Compiler()\n"
        "print(c._child.pid, c._folder.name, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {"PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    pid, folder = done.stdout.split()
    deadline = time.monotonic() + 30
    while (Path("/proc", pid).exists() or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(folder).exists()


def test_lowering_needs_no_device() -> None:
    """The serialized module, with source locations, is lowered under an abstract mesh."""
    program = two_layers()
    plan, traced = autopar.parallelize(mesh="2x8", hardware="h100-sxm")(program.step).planned(*program.abstract_args())
    from autopar.jax_interop import compilation
    from autopar.runtime import jit as execute

    jitted = execute.jit_plan(plan, traced.trace, execute.abstract_mesh(plan.mesh))
    module = compilation.module_bytes(execute.lower_for("cuda", jitted, program.abstract_args()))
    assert len(jax.devices()) < plan.mesh.num_devices
    assert b"Dense_0" in module
