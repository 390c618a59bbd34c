"""Any lowered or compiled program is replayed; what is none is refused; XLA's known errors are there, and not in the replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cli.main import main
from autopar.errors import HardwareError, VerifyError
from autopar.extend.replay import LibraryKernel
from autopar.hardware.profile import load
from autopar.jax_interop.compilation import module_bytes
from autopar.xla_compiler.compiler import CompiledStep, Compiler
from autopar.xla_compiler.estimate_errors import estimate_errors
from autopar.xla_replay.replay import Replay
from benchmarks.absent_gpus import absent_mesh
from tests.test_replay_program import ENTRY, kernel

H100 = "h100-sxm"
X = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
TEXT = ENTRY.format(main=kernel("k"), body="")


def lowered(function: Any, *args: Any, platform: str = "cuda") -> jax.stages.Lowered:
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))


def test_text_and_files_are_replayed(tmp_path: Path) -> None:
    file = tmp_path / "program.txt"
    file.write_text(TEXT, encoding="utf-8")
    from_file = autopar.replay(file, hardware=H100)
    assert from_file == autopar.replay(str(file), hardware=H100) == autopar.replay(TEXT, hardware=H100)
    assert from_file.step_time_s > 0
    assert any("'kernel': its FLOPs are unknown" in note for note in from_file.notes)


def test_a_custom_kernel_is_priced_by_its_given_cost() -> None:
    unknown = autopar.replay(TEXT, hardware=H100)
    by_target = autopar.replay(TEXT, hardware=H100, custom_kernels={"kernel": LibraryKernel(flops=1e12)})
    by_name = autopar.replay(TEXT, hardware=H100, custom_kernels={"jit(f)/k": LibraryKernel(flops=1e12)})
    assert by_target == by_name
    assert by_target.step_time_s > unknown.step_time_s + 1e12 / 989e12
    assert (by_target.flops, by_target.notes) == (1e12, ())


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (3, "cannot replay a int"),
        ("no such file.txt", "cannot read HLO text"),
        ("one\ntwo", "no HLO module"),
        ("a\0b", "cannot read HLO text"),
        ("", "cannot read HLO text"),
    ],
)
def test_what_is_no_program_is_refused(program: Any, text: str) -> None:
    with pytest.raises(VerifyError, match=text):
        autopar.replay(program, hardware=H100)


def test_programs_of_another_platform_are_refused() -> None:
    for_cpu = lowered(lambda x: x @ x, X, platform="cpu")
    with pytest.raises(VerifyError, match="lowered for cpu, not for a GPU"):
        autopar.replay(for_cpu, hardware=H100)
    with pytest.raises(VerifyError, match="compiled for cpu, not for a GPU"):
        autopar.replay(jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile(), hardware=H100)


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(HardwareError, match="no replay rates for 'h1000'"):
        autopar.replay(TEXT, hardware="h1000")


def test_the_command_prints_and_writes_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, timeline = tmp_path / "program.txt", tmp_path / "timeline.json"
    file.write_text(TEXT, encoding="utf-8")
    command = ["replay", str(file), "--hardware", H100, "--perfetto", str(timeline)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step time ") and "not a measurement" in printed
    assert any(event["name"] == "k" for event in json.loads(timeline.read_text())["traceEvents"])
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["operations"][0]["name"] == "k"
    assert main(["replay", str(file), "--hardware", "h100"]) == 2
    assert "Did you mean 'h100-nvl' or 'h100-sxm'?" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path / "none" / "x.json")]) == 2
    assert "cannot write the timeline" in capsys.readouterr().err


# -- with XLA's GPU compiler ------------------------------------------------------------------

PAYLOAD = jax.ShapeDtypeStruct((8, 1 << 26), jnp.float32)


def beside_an_all_reduce(function: Any, *args: Any) -> tuple[CompiledStep, Replay]:
    """A program beside a large all-reduce, so that XLA's scheduler estimates it."""
    profile = load(H100)
    mesh = absent_mesh({"d": 8}, profile)

    def whole(payload: jax.Array, *args: Any) -> Any:
        reduced = jax.lax.with_sharding_constraint(payload.sum(0), NamedSharding(mesh, P()))
        return reduced, function(*args)

    shardings = (NamedSharding(mesh, P("d")), *(NamedSharding(mesh, P()) for _ in args))
    program = jax.jit(whole, in_shardings=shardings).trace(PAYLOAD, *args).lower(lowering_platforms=("cuda",))
    with Compiler(None) as compiler:
        compiled = compiler.compile(module_bytes(program), profile, 8, 1)
    return compiled, autopar.replay(compiled.hlo_text, hardware=H100)


def hidden_s(compiled: CompiledStep) -> float:
    """Seconds of kernels by XLA's estimate: what it hides of the all-reduce, or runs longer than it."""
    assert compiled.step_time_s is not None
    alone = 1.263e-3  # by the same estimate
    return max(compiled.step_time_s, alone) - sum(compiled.exposed_s.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function", "args", "least_s"),
    [
        ("a loop", lambda a: jax.lax.fori_loop(0, 16, lambda _, c: c @ a, a), (X,), 16 * 150e-6),
        (
            "a convolution",
            lambda a, b: jax.lax.conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
            (
                jax.ShapeDtypeStruct((64, 56, 56, 256), jnp.bfloat16),
                jax.ShapeDtypeStruct((3, 3, 256, 256), jnp.bfloat16),
            ),
            200e-6,
        ),
        (
            "custom call __gpu$TopK",
            lambda a: jax.lax.top_k(a, 16),
            (jax.ShapeDtypeStruct((1024, 65536), jnp.float32),),
            80e-6,
        ),
        (
            "a Triton fusion",
            lambda a: jax.nn.softmax(a, -1),
            (jax.ShapeDtypeStruct((16384,) * 2, jnp.bfloat16),),
            250e-6,
        ),
        ("a sort", lambda a: jnp.sort(a, -1), (jax.ShapeDtypeStruct((1024, 65536), jnp.float32),), 100e-6),
        ("an FFT", jnp.fft.fft, (jax.ShapeDtypeStruct((1024, 65536), jnp.complex64),), 200e-6),
    ],
)
def test_what_xla_counts_as_a_launch_is_replayed_in_full(name: str, function: Any, args: Any, least_s: float) -> None:
    compiled, replay = beside_an_all_reduce(function, *args)
    assert name in estimate_errors(compiled.hlo_text)
    assert hidden_s(compiled) < least_s / 5  # XLA's error is still there
    copy_s = 180e-6  # of the payload
    assert replay.kernels_s - copy_s > least_s


@pytest.mark.slow
def test_a_float32_result_of_a_bf16_matmul_costs_its_bytes() -> None:
    def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot(a, b, preferred_element_type=jnp.float32)

    compiled, replay = beside_an_all_reduce(matmul, X, X)
    assert "a bf16 matmul with float32 result" in estimate_errors(compiled.hlo_text)
    assert hidden_s(compiled) > 5e-3
    narrow, other = beside_an_all_reduce(lambda a, b: a @ b, X, X)
    assert estimate_errors(narrow.hlo_text) == ()
    assert other.kernels_s < replay.kernels_s < 1.2 * other.kernels_s


@pytest.mark.slow
def test_a_conditional_is_one_of_xla_s_errors() -> None:
    def either(which: jax.Array, a: jax.Array) -> jax.Array:
        return jax.lax.cond(which, lambda x: x @ x @ x, lambda x: x + 1, a)

    compiled, replay = beside_an_all_reduce(either, jax.ShapeDtypeStruct((), jnp.bool_), X)
    assert "a conditional" in estimate_errors(compiled.hlo_text)
    assert hidden_s(compiled) < 50e-6
    assert replay.kernels_s > 300e-6


@pytest.mark.slow
def test_a_lowered_program_is_compiled_and_replayed() -> None:
    replay = autopar.replay(lowered(lambda x: x @ x, X), hardware=H100)
    assert 140e-6 < replay.step_time_s < 230e-6  # 137 GFLOP
    assert replay.flops == 2.0 * 4096**3
    assert [one.kind for one in replay.operations] == ["gemm"]
