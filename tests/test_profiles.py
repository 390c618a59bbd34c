"""Profiles of runs: read, compared with a plan, and fitted: exact times of hand-made GPU profiles, one real CPU run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from xspaces import US, Device, Kernel, gpu_profile, parsed, write

import autopar
from autopar.cli.main import main
from autopar.errors import HardwareError, PlanMismatchError, ProfileFileError, TargetError, VerifyError
from autopar.plans.plan import Plan
from autopar.verification.compare_profile import compare_profile
from autopar.xla_profile.profile import operations
from autopar.xla_profile.read import read_profile

WIDTH = 256
#: One step on a device: a fusion, a GEMM, an all-reduce of 300 us beside kernels, of which 100 us are exposed.
STEP_US = 500.0
HLO = """\
HloModule jit_run, is_scheduled=true, num_partitions=2

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%tanh_computation (p: f32[256,256]) -> f32[256,256] {
  %p = f32[256,256]{1,0} parameter(0)
  ROOT %tanh.1 = f32[256,256]{1,0} tanh(%p), metadata={op_name="jit(run)/jvp(first)/tanh" source_file="net.py" source_line=3}
}

%add_computation (q: f32[256,256]) -> f32[256,256] {
  %q = f32[256,256]{1,0} parameter(0)
  ROOT %add.1 = f32[256,256]{1,0} add(%q, %q), metadata={op_name="jit(run)/jvp(all)/while/body/eval_jaxpr/transpose(jvp(second))/while/body/closed_call/add"}
}

ENTRY %main (a: f32[256,256]) -> f32[256,256] {
  %a = f32[256,256]{1,0} parameter(0)
  %tanh_fusion.1 = f32[256,256]{1,0} fusion(%a), kind=kLoop, calls=%tanh_computation
  %dot.2 = f32[256,256]{1,0} dot(%tanh_fusion.1, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(run)/transpose(jvp(first))/dot_general" source_file="net.py" source_line=4}
  %all-reduce-start.3 = f32[256,256]{1,0} all-reduce-start(%dot.2), replica_groups={{0,1}}, to_apply=%sum, metadata={op_name="jit(run)/transpose(jvp(first))/dot_general"}
  %add_fusion.4 = f32[256,256]{1,0} fusion(%a), kind=kLoop, calls=%add_computation
  %all-reduce-done.3 = f32[256,256]{1,0} all-reduce-done(%all-reduce-start.3)
  ROOT %out = f32[256,256]{1,0} bitcast(%all-reduce-done.3)
}
"""


def run(name: str, op: str, start_us: float, us: float, at_us: float = 0.0, **more: Any) -> Kernel:
    return Kernel(name, (start_us + at_us) * US, us * US, op, "jit_run" if op else "", **more)


def step(at_us: float, late_us: float = 0.0) -> dict[str, list[Kernel]]:
    """The kernels of one step; `late_us` lengthens its all-reduce at the front."""
    return {
        "Stream #13(Compute)": [
            run("tanh_fusion_1", "tanh_fusion.1", 0, 100, at_us),
            run("ampere_sgemm_128x64", "dot.2", 110, 200, at_us),
            run("add_fusion_4", "add_fusion.4", 310, 90, at_us),
        ],
        "Stream #14(Compute)": [
            run("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "all-reduce-start.3", 200 - late_us, 300 + late_us, at_us)
        ],
    }


def device(starts_us: Sequence[float], late_us: float = 0.0, **more: Any) -> Device:
    streams: dict[str, list[Kernel]] = {}
    for at in starts_us:
        for name, kernels in step(at, late_us).items():
            streams.setdefault(name, []).extend(kernels)
    return Device(streams, **more)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Three steps on two GPUs, 600 us apart."""
    return gpu_profile(tmp_path / "profile", [device([0, 600, 1200]), device([0, 600, 1200], late_us=50)], HLO)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return two_layers()


def two_layers(names: tuple[str, str] = ("first", "second"), mesh: str = "data=2", hardware: str = "h100-sxm") -> Plan:
    """A plan of two layers, whose modules are named."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for name, w in zip(names, weights, strict=True):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def train(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [w - g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]

    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return autopar.plan(train, [shape, shape], shape, mesh=mesh, hardware=hardware)


# -- reading -------------------------------------------------------------------------------------


@pytest.mark.contract
def test_times_of_a_hand_made_profile_are_exact(profile: Path) -> None:
    found = read_profile(profile)
    assert (found.program, found.platform, found.device_kind) == ("jit_run", "gpu", "NVIDIA H100 80GB HBM3")
    assert len(found.devices) == 2
    assert found.num_steps == 3
    assert found.step_time_s == pytest.approx(STEP_US * US)
    assert found.period_s == pytest.approx(600 * US)
    by_name = {one.operation: one for one in operations(found)}
    exposed = {name: round(one.exposed_s / US, 6) for name, one in by_name.items()}
    assert exposed == {"tanh_fusion.1": 100, "dot.2": 200, "add_fusion.4": 90, "all-reduce-start.3": 100}
    assert found.idle_s == pytest.approx(10 * US)
    reduced = by_name["all-reduce-start.3"]
    assert (reduced.kind, reduced.num_runs, reduced.runs_per_step) == ("all-reduce", 6, 1)
    assert reduced.total_s == pytest.approx((3 * 300 + 3 * 350) * US)
    assert reduced.median_s == pytest.approx(325 * US)
    # The other device waits 50 us in the collective; the time of the collective itself is the least.
    assert reduced.fastest_s == pytest.approx(300 * US)
    assert by_name["tanh_fusion.1"].alone_s == pytest.approx(100 * US)
    assert by_name["add_fusion.4"].alone_s is None
    assert "all-reduce-start.3" in found.hlo_text


def test_steps_are_the_runs_of_the_module_where_the_profile_marks_them(tmp_path: Path) -> None:
    starts = [0.0, 600.0, 1200.0]
    marked = device(starts, modules=[(at * US, 500 * US) for at in starts])
    found = read_profile(gpu_profile(tmp_path, [marked], HLO))
    assert [len(one.runs) for one in found.devices[0].steps] == [4, 4, 4]
    assert [one.seconds for one in found.devices[0].steps] == pytest.approx([500 * US] * 3)


def test_an_incomplete_step_and_an_outlier_are_left_out(tmp_path: Path) -> None:
    whole = device([0, 600, 1200, 1800])
    streams = {name: list(kernels) for name, kernels in whole.streams.items()}
    slow = streams["Stream #14(Compute)"][2]
    streams["Stream #14(Compute)"][2] = replace(slow, seconds=1000 * US)
    streams["Stream #13(Compute)"].append(run("tanh_fusion_1", "tanh_fusion.1", 2900, 100))
    found = read_profile(gpu_profile(tmp_path, [Device(streams)], HLO))
    assert found.num_steps == 3
    assert found.step_time_s == pytest.approx(STEP_US * US)
    assert any("2 steps of a device left out" in note for note in found.notes)


def test_kernels_of_cuda_graphs_are_found_by_their_names(tmp_path: Path) -> None:
    """XLA's own kernels have the name of their fusion; those of libraries remain without an instruction."""
    streams = {
        name: [
            kernel if kernel.name.startswith("nccl") else replace(kernel, hlo_op="", hlo_module="")
            for kernel in kernels
        ]
        for name, kernels in device([0, 600]).streams.items()
    }
    found = read_profile(gpu_profile(tmp_path, [Device(streams)], HLO))
    names = {one.operation for one in operations(found)}
    assert names == {"tanh_fusion.1", "add_fusion.4", "all-reduce-start.3", "(ampere_sgemm_128x64)"}
    assert any("xla_gpu_enable_command_buffer=" in note for note in found.notes)


@pytest.mark.contract
def test_what_is_no_profile_is_refused(tmp_path: Path, profile: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    garbage = tmp_path / "garbage.xplane.pb"
    garbage.write_bytes(b"no profile \xff\xff\xff")
    whole = next(profile.rglob("*.xplane.pb")).read_bytes()
    cut = tmp_path / "cut.xplane.pb"
    cut.write_bytes(whole[: len(whole) // 2])
    without = gpu_profile(tmp_path / "without", [Device({"Stream #1": []})])
    nameless = gpu_profile(tmp_path / "nameless", [Device({"Stream #1": [Kernel("sgemm", 0, US)]})])
    for path, message in (
        (tmp_path / "nowhere", r"there is no profile '.*nowhere'; record one .*jax\.profiler\.trace"),
        (empty, r"holds no \*\.xplane\.pb file"),
        (garbage, "is no JAX profile, or a damaged one"),
        (cut, "is no JAX profile, or a damaged one"),
        (without, "has no kernel of a GPU or CPU device"),
        (write(tmp_path / "bare", []), "has no kernel of a GPU or CPU device"),
        (nameless, "no kernel in the profile .* names its HLO module.*command_buffer"),
    ):
        with pytest.raises(ProfileFileError, match=message):
            read_profile(path)
    with pytest.raises(ProfileFileError, match="has no program 'other'; it has jit_run"):
        read_profile(profile, program="other")
    assert read_profile(profile, program="run").program == "jit_run"


def test_a_damaged_hlo_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA aborts its process on some modules; the reader survives that."""
    damaged = gpu_profile(tmp_path / "damaged", [device([0, 600])], b"\xff\xff")
    for _ in range(2):
        found = read_profile(damaged)
        assert not found.hlo_text
        assert found.step_time_s == pytest.approx(STEP_US * US)
        assert any("or a damaged one" in note for note in found.notes)
        monkeypatch.setattr("autopar.jax_interop.xplane._READ_MODULE", "import os; os.abort()")


def test_a_loop_at_the_front_does_not_begin_steps(tmp_path: Path) -> None:
    """The predicate of a loop is copied to the host once an iteration, in the name of the loop."""
    loop = """\
%condition (c: f32[256,256]) -> pred[] {
  %c = f32[256,256]{1,0} parameter(0)
  ROOT %never = pred[] constant(false)
}

ENTRY"""
    hlo = HLO.replace("ENTRY", loop).replace(
        "  %tanh_fusion.1 = f32[256,256]{1,0} fusion(%a)",
        "  %while.9 = f32[256,256]{1,0} while(%a), condition=%condition, body=%add_computation\n"
        "  %tanh_fusion.1 = f32[256,256]{1,0} fusion(%while.9)",
    )
    starts = [100, 700, 1300]
    streams = {name: list(kernels) for name, kernels in device(starts).streams.items()}
    streams["Stream #13(Compute)"] += [run("MemcpyD2H", "while.9", at - us, 2) for at in starts for us in (40, 20)]
    found = read_profile(gpu_profile(tmp_path, [Device(streams)], hlo))
    assert found.num_steps == 3
    assert {one.kind for one in operations(found) if one.operation == "while.9"} == {"host-copy"}


def test_of_several_recordings_the_newest_is_read_with_all_its_processes(tmp_path: Path) -> None:
    gpu_profile(tmp_path, [device([0])], HLO, host="a")
    gpu_profile(tmp_path, [device([0])], HLO, host="b")
    old = tmp_path / "plugins" / "profile" / "2025_01_01_00_00_00" / "a.xplane.pb"
    old.parent.mkdir()
    old.write_bytes(b"\xff")
    found = read_profile(tmp_path)
    assert [one.name for one in found.devices] == ["a GPU:0", "b GPU:0"]


# -- comparing -----------------------------------------------------------------------------------


def test_measured_next_to_predicted_and_replayed(profile: Path, plan: Plan) -> None:
    found = compare_profile(plan, profile)
    assert found.step_time.measured_s == pytest.approx(STEP_US * US)
    assert found.step_time.predicted_s == plan.prediction.step_time_s
    assert found.step_time.replayed_s is not None
    measured = {row.name: round(row.exposed.measured_s / US, 6) for row in found.rows if row.exposed.measured_s}
    assert measured == {
        "first, forward": 100,
        "first, backward": 200,
        "second, backward": 90,
        "all-reduce over data, backward": 100,
        "idle time between kernels": 10,
    }
    assert sum(row.exposed.measured_s for row in found.rows) == pytest.approx(STEP_US * US)
    assert sum(row.exposed.predicted_s for row in found.rows) == pytest.approx(plan.prediction.step_time_s, rel=1e-3)
    assert sum(row.exposed.replayed_s or 0 for row in found.rows) == pytest.approx(found.step_time.replayed_s)
    sizes = [row.largest_s for row in found.rows]
    assert sizes == sorted(sizes, reverse=True)
    sources = {row.name: row.source for row in found.rows}
    assert sources["first, forward"] == "net.py:3"
    assert sources["first, backward"] == "net.py:4"
    assert found.by_phase()["backward"].measured_s == pytest.approx(390 * US)
    assert found.by_module()["first"].measured_s == pytest.approx(300 * US)
    assert found.by_collective()["all-reduce over data"].measured_s == pytest.approx(100 * US)
    assert found.by_collective(hidden=True)["all-reduce over data"].measured_s == pytest.approx(325 * US)
    assert "Most of the difference is" in found.reason() or "The largest part" in found.reason()
    text = str(found)
    for heading in ("predicted", "replayed", "measured", "Collectives", "Kernels by module"):
        assert heading in text
    assert json.loads(json.dumps(found.to_json()))["step_time"]["measured_s"] == pytest.approx(STEP_US * US)


def test_the_reason_names_the_part_that_differs_most(profile: Path, plan: Plan) -> None:
    found = compare_profile(plan, profile)
    row = max(found.rows, key=lambda row: row.exposed.difference_s)
    assert row.name == "first, backward"
    assert "longer than predicted" in found.reason()
    assert "first, backward" in found.reason()


def test_the_hlo_may_come_from_a_file(tmp_path: Path, plan: Plan) -> None:
    bare = gpu_profile(tmp_path / "bare", [device([0, 600])])
    without = compare_profile(plan, bare)
    assert without.step_time.replayed_s is None
    assert any("pass --hlo FILE" in note for note in without.notes)
    assert without.by_collective()["all-reduce"].measured_s == pytest.approx(100 * US)
    file = tmp_path / "hlo.txt"
    file.write_text(HLO)
    found = compare_profile(plan, bare, hlo=file)
    assert found.by_module()["first"].measured_s == pytest.approx(300 * US)
    file.write_text(HLO.replace("fusion.", "other.").replace("dot.2", "dot.9").replace("-start.3", "-start.5"))
    with pytest.raises(ProfileFileError, match=r"has 0 of the 4 operations of 'jit_run' .* it is of another program"):
        compare_profile(plan, bare, hlo=file)
    file.write_text("no HLO")
    with pytest.raises(VerifyError, match="no HLO module"):
        compare_profile(plan, bare, hlo=file)
    with pytest.raises(VerifyError, match="cannot read HLO text"):
        compare_profile(plan, bare, hlo=tmp_path / "nowhere")


def test_the_step_is_compiled_where_the_profile_has_no_hlo(
    tmp_path: Path, profile: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def verify(step: Any, *args: Any, plan: Plan) -> Any:
        compiled.append((step, args))
        return SimpleNamespace(compiled=SimpleNamespace(hlo_text=HLO))

    monkeypatch.setattr("autopar.verification.compare_profile.verify", verify)
    bare = gpu_profile(tmp_path / "bare", [device([0, 600])])
    found = compare_profile(plan, bare, step=(max, (1, 2)))
    assert compiled == [(max, (1, 2))]
    assert found.by_module()["first"].measured_s == pytest.approx(300 * US)
    compare_profile(plan, profile, step=(max, (1, 2)))
    assert len(compiled) == 1  # the profile's own HLO is that of the run


def test_a_profile_of_another_program_is_refused(tmp_path: Path, profile: Path, plan: Plan) -> None:
    with pytest.raises(
        ProfileFileError, match=r"its modules \(first, second\) are none of those of the plan .*encoder"
    ):
        compare_profile(two_layers(("encoder", "decoder")), profile)
    with pytest.raises(ProfileFileError, match="'jit_run' ran on 2 devices, the plan is for 4"):
        compare_profile(two_layers(mesh="data=4"), profile)
    with pytest.raises(PlanMismatchError, match="has no timeline"):
        compare_profile(replace(plan, trace=None), profile)
    with pytest.raises(HardwareError, match="no replay rates for 'h1000'"):
        compare_profile(plan, profile, hardware="h1000")


def test_a_run_on_cpus_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A planned step runs on 8 virtual devices under JAX's profiler, and the command compares it with its plan."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for layer, w in enumerate(weights):
            with jax.named_scope(f"layer_{layer}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    @autopar.parallelize(mesh="data=8", hardware="cpu-host")
    def train(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]

    weights, x = [jnp.full((WIDTH, WIDTH), 0.01)] * 3, jnp.ones((64, WIDTH))
    weights = jax.block_until_ready(train(weights, x))
    with jax.profiler.trace(str(tmp_path / "profile")):
        for _ in range(3):
            weights = jax.block_until_ready(train(weights, x))
    train.plan(weights, x).save(tmp_path / "plan.json")
    assert main(["compare-profile", str(tmp_path / "plan.json"), str(tmp_path / "profile"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_devices"] == 8
    assert found["num_steps"] >= 1
    assert found["step_time"]["measured_s"] > 0
    assert found["step_time"]["replayed_s"] is None
    assert {"layer_{0..2}"} <= set(found["by_module"])
    assert all(found["by_phase"][phase]["measured_s"] > 0 for phase in ("forward", "backward"))
    assert found["by_collective"]
    assert sum(row["exposed"]["measured_s"] for row in found["rows"]) == pytest.approx(found["step_time"]["measured_s"])
    assert any("no replay" in note for note in found["notes"])
    assert main(["compare-profile", str(tmp_path / "plan.json"), str(tmp_path / "profile")]) == 0
    assert "predicted  replayed  measured" in capsys.readouterr().out


# -- fitting -------------------------------------------------------------------------------------

DEVICES = 8
#: Constants of the device that made the profile, relative to the H100's.
TRUE = {
    ("gemm", "bf16", "efficiency"): 0.8,
    ("device", "hbm_efficiency"): 0.85,
    ("kernels", "launch_s"): 1.6,
    ("link", "efficiency"): 0.7,
    ("link", "launch_s"): 1.5,
}
GAP_US = 1.5


def _entry() -> tuple[str, str]:
    """Computations and instructions of a program with GEMMs, fusions and all-reduces of many sizes."""
    computations, lines = [], []
    gemms = [(m, n, k) for m in (4096, 8192) for n in (4096, 8192) for k in (2048, 4096, 8192)]
    gemms += [(64, 128 * i, 64) for i in range(1, 8)]
    for number, (m, n, k) in enumerate(gemms):
        lines += [
            f"  %l.{number} = bf16[{m},{k}]{{1,0}} parameter({2 * number})",
            f"  %r.{number} = bf16[{k},{n}]{{1,0}} parameter({2 * number + 1})",
            f"  %dot.{number} = bf16[{m},{n}]{{1,0}} dot(%l.{number}, %r.{number}), lhs_contracting_dims={{1}},"
            f" rhs_contracting_dims={{0}}",
        ]
    at = 2 * len(gemms)
    for number, size in enumerate([2**e for e in (8, 9, 10, 11, 12, 13, 14, 22, 23, 24, 25, 26, 27, 28)]):
        computations.append(
            f"%fused.{number} (p: f32[{size}]) -> f32[{size}] {{\n  %p.{number} = f32[{size}]{{0}} parameter(0)\n"
            f"  ROOT %n.{number} = f32[{size}]{{0}} negate(%p.{number})\n}}\n"
        )
        lines += [
            f"  %f.{number} = f32[{size}]{{0}} parameter({at + 2 * number})",
            f"  %fusion.{number} = f32[{size}]{{0}} fusion(%f.{number}), kind=kLoop, calls=%fused.{number}",
            f"  %s.{number} = f32[{size}]{{0}} parameter({at + 2 * number + 1})",
            f"  %all-reduce.{number} = f32[{size}]{{0}} all-reduce(%s.{number}), channel_id={number + 1},"
            f" replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%sum",
        ]
    parameters = sorted(
        (line for line in lines if " parameter(" in line),
        key=lambda line: int(line.split("parameter(")[1].rstrip(")")),
    )
    signature = ", ".join(f"a{n}: {line.split(' = ')[1].split('{')[0]}" for n, line in enumerate(parameters))
    head = f"ENTRY %main ({signature}) -> f32[256] {{\n"
    return "\n".join(computations), head + "\n".join(lines) + "\n  ROOT %out = f32[256]{0} bitcast(%all-reduce.0)\n}\n"


def _program() -> str:
    computations, entry = _entry()
    scalar = "%sum (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
    scalar += "  ROOT %z = f32[] add(%x, %y)\n}\n"
    return f"HloModule jit_run, is_scheduled=true, num_partitions={DEVICES}\n\n{scalar}\n{computations}\n{entry}"


def _profile_of(folder: Path, hlo: str, factors: dict[tuple[str, ...], float], noise: float = 0.0) -> Path:
    """A profile of three steps whose kernels take what the replay's formulas say with other constants.

    Args:
        noise: spread of the kernels' times; above 0, one in ten also takes three times as long.
    """
    from autopar.calibration.fit_rates import constant_of, with_constant
    from autopar.xla_compiler.hlo_text import parse_module
    from autopar.xla_replay import rates
    from autopar.xla_replay.device_prices import DevicePrices
    from autopar.xla_replay.program import replay_module

    true = rates.load("h100-sxm")
    for constant, factor in factors.items():
        true = with_constant(true, constant, factor * constant_of(true, constant))
    true = with_constant(true, ("kernels", "gap_s"), 0.0)
    found = replay_module(parse_module(hlo), DevicePrices(true, DEVICES)).operations
    rng = np.random.default_rng(0)
    factor = np.exp(noise * rng.normal(size=len(found))) * np.where(rng.random(len(found)) < 0.1 * (noise > 0), 3, 1)
    seconds = {one.name: one.seconds * float(each) for one, each in zip(found, factor, strict=True)}
    order = [one.name for one in parse_module(hlo).main.instructions if one.name in seconds]
    devices = []
    for number in range(DEVICES):
        kernels, now = [], 0.0
        for _ in range(3):
            for name in order:
                late = 20 * US * (number % 3) if name.startswith("all-reduce") else 0.0
                kernels.append(Kernel(f"kernel_{name}", now, seconds[name] + late, name, "jit_run"))
                now += seconds[name] + late + GAP_US * US
            now += 1e-3
        devices.append(Device({"Stream #13": kernels}))
    return gpu_profile(folder, devices, hlo)


def test_calibrate_recovers_known_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.calibration.fit_rates import constant_of
    from autopar.hardware.profile import load as load_hardware
    from autopar.xla_replay import rates

    folder = _profile_of(tmp_path / "profile", _program(), TRUE)
    target = tmp_path / "mine.toml"
    assert main(["calibrate", "--from", str(folder), "-o", str(target)]) == 0
    text = capsys.readouterr().out
    base, fitted = rates.load("h100-sxm"), rates.load(tmp_path / "mine.replay.toml")
    for constant, factor in TRUE.items():
        assert constant_of(fitted, constant) == pytest.approx(factor * constant_of(base, constant), rel=0.05), constant
    assert fitted.kernels.gap_s == pytest.approx(GAP_US * US, rel=0.05)
    assert fitted.gemm["f32"] == base.gemm["f32"]
    assert "calibrate --from" in fitted.sources["link"]
    assert "bf16 GEMMs: " in text
    assert "held-out error" in text
    # The planner's profile: the bandwidth that the fusions reach, the FLOP/s that the GEMMs reach.
    planned = load_hardware(str(target))
    assert rates.load(planned.rates_name) == fitted == rates.load(target)
    reached = 0.85 * base.device.hbm_bytes_per_s * base.device.hbm_efficiency
    assert planned.hbm_bytes_per_s == pytest.approx(reached, rel=0.1)
    peak = 0.8 * base.gemm["bf16"].peak_flops_per_s * base.gemm["bf16"].efficiency
    assert planned.matrix_rate("bfloat16") == pytest.approx(peak, rel=0.15)
    assert len(json.loads((tmp_path / "mine.json").read_text())["samples"]) > 10
    assert not list(tmp_path.glob(".*.tmp"))


def test_outliers_do_not_move_the_constants(tmp_path: Path) -> None:
    from autopar.calibration.from_profile import calibrate_from_profile

    folder = _profile_of(tmp_path / "profile", _program(), TRUE, noise=0.05)
    found = calibrate_from_profile(folder, tmp_path / "mine.toml")
    fitted = {one.name: one.after / one.before for one in found.rates.constants}
    for constant in (("gemm", "bf16", "efficiency"), ("device", "hbm_efficiency"), ("link", "efficiency")):
        assert fitted[".".join(constant)] == pytest.approx(TRUE[constant], rel=0.1)
    assert all(one.error_after < one.error_before for one in found.rates.groups if one.num_held_out)


def test_calibrate_refuses_a_profile_that_determines_nothing(tmp_path: Path, profile: Path) -> None:
    from autopar.calibration.from_profile import calibrate_from_profile

    target = tmp_path / "mine.toml"
    with pytest.raises(ProfileFileError, match=r"determines no constant \(.*too few.*record more steps"):
        calibrate_from_profile(profile, target)
    bare = gpu_profile(tmp_path / "bare", [device([0])])
    with pytest.raises(ProfileFileError, match=r"does not hold the HLO of 'jit_run'.*pass --hlo FILE"):
        calibrate_from_profile(bare, target)
    other = gpu_profile(tmp_path / "other", [device([0], kind="Other GPU")], HLO)
    with pytest.raises(HardwareError, match=r"'Other GPU'.*Pass --base NAME, the most similar device"):
        calibrate_from_profile(other, target)
    with pytest.raises(HardwareError, match=r"give -o a \.toml file"):
        calibrate_from_profile(profile, tmp_path / "mine.json")
    assert not target.exists()
    assert not list(tmp_path.glob("mine*"))


def test_calibrate_writes_all_files_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.calibration.from_profile import calibrate_from_profile

    folder, target = _profile_of(tmp_path / "profile", _program(), TRUE), tmp_path / "out" / "mine.toml"
    target.parent.mkdir()
    write_text, written = Path.write_text, []

    def full_disk(path: Path, *args: Any, **more: Any) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write_text(path, *args, **more)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(HardwareError, match=r"cannot write the calibration to '.*mine\.toml': No space left"):
        calibrate_from_profile(folder, target)
    assert len(written) == 3
    assert not list(target.parent.iterdir())


def test_a_constant_that_few_samples_depend_on_is_not_fitted(tmp_path: Path) -> None:
    from autopar.calibration.from_profile import calibrate_from_profile, describe

    lines = [line for line in _program().splitlines() if not line.startswith(("  %dot.", "  %all-reduce."))]
    hlo = "\n".join(lines).replace("bitcast(%all-reduce.0)", "bitcast(%fusion.0)") + "\n"
    found = calibrate_from_profile(_profile_of(tmp_path / "profile", hlo, TRUE), tmp_path / "mine.toml")
    assert {one.name for one in found.rates.constants} == {"device.hbm_efficiency", "kernels.launch_s", "kernels.gap_s"}
    assert found.rates.not_fitted["link.efficiency"] == "too few collectives over NVLink: 0 of at least 5"
    assert "link.efficiency: too few collectives over NVLink: 0 of at least 5" in describe(found)


def test_a_run_on_cpus_calibrates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    double = jax.jit(lambda x: x * 2)
    double(jnp.ones(8)).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        double(jnp.ones(8)).block_until_ready()
    assert main(["calibrate", "--from", str(tmp_path)]) == 2
    assert "is of cpu devices; the replay has rates of GPUs" in capsys.readouterr().err


def test_options_of_calibrate_that_have_no_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--from", "somewhere", "--seconds", "3"]) == 2
    assert "--from measures nothing: drop --seconds" in capsys.readouterr().err
    assert main(["calibrate", "--hlo", "somewhere"]) == 2
    assert "without --from the devices of this machine are measured: drop --hlo" in capsys.readouterr().err
    assert issubclass(TargetError, ValueError)


def test_the_hlo_of_the_tests_is_hlo() -> None:
    for text in (HLO, _program()):
        assert parsed(text).name == "jit_run"
