"""The benchmark that compares predictions with XLA: its figures, its pins, its cache. Nothing is compiled for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.hardware.profile import load
from autopar.ir.mesh import parse_mesh
from autopar.jax_interop.compilation import module_bytes
from autopar.solve.problem import Edge, Problem
from autopar.xla_compiler.compiler import CompiledStep
from benchmarks import compile_cache, proof_summary
from benchmarks.baselines import pinned
from benchmarks.baselines.megatron_only import data_dims, data_whole_over
from benchmarks.frozen_choices import Frozen, Remembering
from benchmarks.proof_summary import kendall_tau, median_error, off, own_rank, share_within, summary, tau_of, worst

# -- figures ---------------------------------------------------------------------------------


def test_kendalls_tau_counts_pairs_ranked_alike() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([3, 2, 1], [10, 20, 30]) == -1
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)


def test_kendalls_tau_passes_over_what_is_nearly_the_same() -> None:
    assert kendall_tau([1, 2, 3], [10.1, 10.0, 20]) == 1  # the first two are within 2 %
    assert kendall_tau([1, 2], [10, 10]) is None
    assert kendall_tau([5], [10]) is None
    assert kendall_tau([2, 2, 3], [10, 20, 30]) == pytest.approx(2 / 3)  # predicted equal, though they differ


def row(case: str = "m/fsdp@8", **more: Any) -> dict[str, Any]:
    model, rest = case.split("/")
    recipe, mesh = rest.split("@")
    return {
        "case": case,
        "model": model,
        "recipe": recipe,
        "mesh": mesh,
        "gpus": parse_mesh(mesh).num_devices,
        "fitted": True,
        "failed": "",
        "words": "in words",
        "peak_predicted": 1e9,
        "peak_compiled": 1e9,
        "peak_off": 0.0,
        "wire_predicted": 1e6,
        "wire_compiled": 1e6,
        "wire_off": 0.0,
        "kind_off": 0.0,
        "kind_name": "",
        "unpredicted_over_1mb": 0,
        "step_predicted_s": 1.0,
        "step_xla_s": 1.0,
        "step_off": 0.0,
        "plan_s": 1.0,
        "verify_s": 1.0,
        "compile_s": 1.0,
    } | more


def test_errors_lose_their_sign_in_medians_and_in_the_worst() -> None:
    rows = [row(peak_off=error) for error in (-0.5, 0.1, 0.2)] + [row(peak_off=None)]
    assert median_error(rows, "peak_off") == pytest.approx(0.2)
    found = worst(rows, "peak_off")
    assert found is not None
    assert found["peak_off"] == -0.5
    assert share_within(rows, "peak_off") == pytest.approx(2 / 3)
    assert median_error([], "peak_off") is None
    assert worst([], "peak_off") is None
    assert share_within([], "peak_off") is None
    assert off(1.0, 0.0) is None


def test_only_plans_for_as_many_gpus_are_ranked_against_one_another() -> None:
    eight = [row(step_predicted_s=1, step_xla_s=1), row(step_predicted_s=2, step_xla_s=2)]
    sixteen = [row("m/fsdp@16", step_predicted_s=3, step_xla_s=0.5), row("m/fsdp@16", step_predicted_s=4, step_xla_s=3)]
    assert tau_of(eight + sixteen) == 1
    assert tau_of([*eight, row(step_predicted_s=0.5, step_xla_s=4)]) == pytest.approx(-1 / 3)
    assert tau_of([row("m/fsdp@8"), row("m/fsdp@16", step_xla_s=5)]) is None


def test_the_rank_of_an_own_plan_is_among_those_by_hand() -> None:
    own = row("m/autopar@2x4", step_xla_s=1.0)
    hand = [row(step_xla_s=seconds) for seconds in (0.5, 0.99, 2.0)]
    others = [row("m/fsdp@16", step_xla_s=0.1), row("n/fsdp@8", step_xla_s=0.1), row("m/autopar@4x2", step_xla_s=0.1)]
    assert own_rank(own, [own, *hand, *others]) == (2, 4)


def test_the_summary_tells_failures_and_publishes_between_markers(tmp_path: Path) -> None:
    failed = {key: row("m/fsdp@16")[key] for key in ("case", "model", "recipe", "mesh", "gpus", "fitted")}
    rows = [row(), row("m/autopar@1x8"), row("n/fsdp@8", fitted=False), failed | {"failed": "BudgetError: too small"}]
    text = summary(rows)
    assert "n (held out)" in text
    assert "- m/fsdp@16: BudgetError: too small" in text
    assert "BudgetError" in proof_summary.page_table(rows)
    page = tmp_path / "accuracy.md"
    page.write_text("# Accuracy\n\nAs before.\n")
    for about in ("First.", "Second."):
        proof_summary.publish(rows, about, page)
    assert page.read_text().startswith("# Accuracy\n\nAs before.\n")
    assert "Second." in page.read_text()
    assert "First." not in page.read_text()


# -- plans by hand -----------------------------------------------------------------------------


def arguments(batch: int = 16) -> tuple[Any, Any]:
    def kernel(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    state = {
        "h": {"0": {"attn": {"c_attn": {"kernel": kernel(48, 16)}, "c_proj": {"kernel": kernel(16, 16)}}}},
        "layers": {"0": {"self_attn": {"q_proj": {"kernel": kernel(16, 32)}, "o_proj": {"kernel": kernel(32, 16)}}}},
        "wte": {"embedding": kernel(101, 16)},
        "norm": {"scale": kernel(3)},
    }
    return state, {"tokens": jax.ShapeDtypeStruct((batch, 8), jnp.int32)}


def test_pins_by_hand() -> None:
    args = arguments()
    assert set(pinned.data_parallel(args, parse_mesh("8")).values()) == {PartitionSpec(), PartitionSpec("data")}
    split = pinned.fsdp(args, parse_mesh("8"))
    assert split["state/h/0/attn/c_attn/kernel"] == PartitionSpec("data")
    assert split["state/wte/embedding"] == PartitionSpec(None, "data")
    assert split["state/norm/scale"] == PartitionSpec()
    megatron = pinned.tensor_parallel(args, parse_mesh("2x4"))
    assert megatron["batch/tokens"] == PartitionSpec("data")
    assert megatron["state/h/0/attn/c_attn/kernel"] == PartitionSpec("model")  # kernels of GPT-2 are (out, in)
    assert megatron["state/h/0/attn/c_proj/kernel"] == PartitionSpec(None, "model")
    assert megatron["state/layers/0/self_attn/q_proj/kernel"] == PartitionSpec(None, "model")
    assert megatron["state/layers/0/self_attn/o_proj/kernel"] == PartitionSpec("model")
    assert megatron["state/wte/embedding"] == PartitionSpec()  # 101 words do not divide
    with pytest.raises(ValueError, match="does not divide"):
        pinned.data_parallel(arguments(batch=12), parse_mesh("8"))


@pytest.mark.slow
def test_megatron_only_keeps_the_batch_whole_over_its_axis() -> None:
    program, mesh = programs.gpt(batch=512, sizes=programs.GPTSizes(num_layers=1)), parse_mesh("2x4")
    args = program.abstract_args()
    pins = pinned.tensor_parallel(args, mesh)

    def splits_data() -> bool:
        plan = autopar.plan(program.step, *args, mesh=mesh, pin=pins, hardware="h100-sxm")
        dims = [(one.sharding, data_dims(one.shape, 512, (16,))) for one in plan.decisions]
        return any("model" in sharding.dims[dim] for sharding, data in dims for dim in data)

    assert splits_data()
    with data_whole_over("model", 512, (16,)):
        assert not splits_data()
    assert splits_data()


def test_frozen_choices_are_priced_and_not_chosen(tmp_path: Path) -> None:
    problem = Problem((np.array([1.0, 2.0]), np.array([3.0, 1.0])), (Edge(0, 1, np.zeros((2, 2))),))
    solver = Remembering()
    assert solver.solve(problem).choices == (0, 1)
    solver.save(tmp_path / "choices" / "case.json")
    dearer = Problem((np.array([9.0, 2.0]), np.array([3.0, 4.0])))
    frozen = Frozen.load(tmp_path / "choices" / "case.json")
    assert frozen.solve(dearer).choices == (0, 1)
    assert frozen.solve(dearer).cost == 13.0
    assert frozen.solve(Problem((np.array([2.0, 1.0]),))).choices == (1,)  # another problem is solved


# -- the cache ---------------------------------------------------------------------------------


def lowered(function: Any) -> bytes:
    return module_bytes(jax.jit(function).trace(jax.ShapeDtypeStruct((4,), jnp.float32)).lower())


def the_same_elsewhere() -> Any:
    def f(x: jax.Array) -> jax.Array:
        return x + 1

    return f


def test_the_key_of_a_compile_passes_over_source_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load("h100-sxm")
    monkeypatch.setenv("XLA_FLAGS", "")

    def f(x: jax.Array) -> jax.Array:
        return x + 1

    here = lowered(f)
    elsewhere, other = lowered(the_same_elsewhere()), lowered(lambda x: x + 2)
    assert here != elsewhere
    known = compile_cache.key(here, profile, 8, 1)
    assert known == compile_cache.key(elsewhere, profile, 8, 1)
    assert known != compile_cache.key(other, profile, 8, 1)
    assert known != compile_cache.key(here, profile, 16, 2)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8")
    assert known == compile_cache.key(here, profile, 8, 1)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert known != compile_cache.key(here, profile, 8, 1)


def test_a_compile_is_kept_and_found(tmp_path: Path) -> None:
    compiled = CompiledStep(
        argument_bytes=1,
        temp_bytes=2,
        output_bytes=3,
        alias_bytes=0,
        step_time_s=None,
        exposed_s={"all-reduce": 1e-3},
        compile_s=4,
        hosts=(0, 0),
        flags=("--a",),
        hlo_text="HloModule m",
    )
    assert compile_cache.load(tmp_path, "k") is None
    compile_cache.save(tmp_path, "k", compiled)
    assert compile_cache.load(tmp_path, "k") == compiled
    facts = tmp_path / "k.json"
    facts.write_text(facts.read_text().replace("{", '{"new": 1,', 1))  # by an autopar that keeps more
    assert compile_cache.load(tmp_path, "k") == compiled
    facts.write_text(facts.read_text().replace("temp_bytes", "other_bytes"))  # by one that keeps less
    assert compile_cache.load(tmp_path, "k") is None
