"""Calibration: fits recover coefficients, the profile loads, and files are written atomically."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autopar.calibration import calibrate as calibrate_module
from autopar.calibration import layer_probes, measure, probes
from autopar.calibration.calibrate import calibrate
from autopar.calibration.calibration import Calibration, Machine, describe, fit_all, profile_table, toml, write
from autopar.calibration.fit import Sample, fit
from autopar.calibration.probes import DTYPES, GPU_SIZES, collective_points, matmul_points, ring
from autopar.cli.main import main
from autopar.cost.collectives import KINDS, collective_time
from autopar.errors import HardwareError
from autopar.hardware import profile as hardware
from autopar.ir.mesh import parse_mesh
from benchmarks.gpu.calibration import TINY as TINY_OF_A_DRY_RUN

CALIBRATED = Path(__file__).resolve().parent.parent / "cost_models" / "calibrated"
TINY = replace(TINY_OF_A_DRY_RUN, dtypes=("float32", "float64", "int8"))
MACHINE = Machine(
    device_kind="NVIDIA H100 80GB HBM3",
    platform="gpu",
    num_devices=8,
    host='a "host" with 2 cores',
    versions={"jax": "0.0"},
    date="2026-11-21",
    command="autopar calibrate",
)

# -- fits ------------------------------------------------------------------------------------


def noisy(group: str, rows: list[dict[str, float]], seconds_per: dict[str, float], noise: float) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [
        Sample(group, str(n), row, sum(seconds_per[t] * row[t] for t in row) * float(1 + noise * rng.uniform(-1, 1)))
        for n, row in enumerate(rows)
    ]


@pytest.mark.contract
def test_a_fit_recovers_the_coefficients_of_noisy_samples() -> None:
    truth = {"launch": 5e-6, "flops": 1 / 9e14, "bytes": 1 / 1e13}
    rows = [
        {"launch": 1.0, "flops": 2.0 * m * k * n, "bytes": 2.0 * (m * k + k * n + m * n)}
        for m in (64, 512, 4096)
        for k in (128, 1024, 8192)
        for n in (256, 2048)
    ]
    found = fit("matmul", noisy("matmul", rows, truth, 0.02), tuple(truth))
    assert found is not None
    assert found.seconds_per == pytest.approx(truth, rel=0.1)
    assert found.mean_error is not None
    assert found.worst_error is not None
    assert 0 < found.mean_error < 0.03
    assert found.worst_error < 0.1


def test_the_error_is_that_of_held_out_samples() -> None:
    """The cross-validated error reflects noise of 30 %."""
    rows = [{"launch": 1.0, "bytes": float(2**e)} for e in range(10, 30)]
    found = fit("copy", noisy("copy", rows, {"launch": 1e-5, "bytes": 1e-9}, 0.3), ("launch", "bytes"))
    assert found is not None
    assert found.mean_error is not None
    assert 0.1 < found.mean_error < 0.3


def test_no_coefficient_is_negative() -> None:
    falling = [Sample("x", str(n), {"launch": 1.0, "bytes": float(n)}, 1.0 / n) for n in range(1, 9)]
    found = fit("x", falling, ("launch", "bytes"))
    assert found is not None
    assert all(each >= 0 for each in found.seconds_per.values())


def test_too_few_samples_give_no_error_or_no_fit() -> None:
    rows = noisy("x", [{"launch": 1.0, "bytes": float(n)} for n in (1, 2, 3)], {"launch": 1.0, "bytes": 1.0}, 0.0)
    few = fit("x", rows, ("launch", "bytes"))
    assert few is not None
    assert few.mean_error is None
    assert fit("x", rows[:1], ("launch", "bytes")) is None


# -- the profile -----------------------------------------------------------------------------


def synthetic(profile: hardware.HardwareProfile) -> tuple[Sample, ...]:
    """The samples of a machine with the rates of a profile."""
    samples = []
    for kind in KINDS:
        for n in (2, 4, 8):
            for payload in (2.0**14, 2.0**20, 2.0**24, 2.0**28):
                hops, moved = ring(kind, n, payload)
                seconds = collective_time(kind, payload, ("x",), parse_mesh(f"x={n}"), profile)
                samples.append(
                    Sample(kind, f"{payload} over {n}", {"launch": 1.0, "hops": hops, "bytes": moved}, seconds)
                )
    for dtype in ("bfloat16", "float32"):
        for size in (256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0):
            counts = {"launch": 1.0, "flops": 2 * size**3, "bytes": 6 * size**2}
            seconds = 2e-6 + counts["flops"] / profile.matrix_rate(dtype) + counts["bytes"] / 1e13
            samples.append(Sample(f"matmul {dtype}", f"{size:g}", counts, seconds))
    return tuple(samples)


@pytest.mark.contract
def test_the_profile_has_the_fitted_figures_and_marks_the_others(tmp_path: Path) -> None:
    base = hardware.load("h100-sxm")
    true = replace(
        base,
        xla_estimator=None,
        host_link=hardware.LinkProfile(bytes_per_s=3.21e11, latency_s=1.5e-6),
        collective_launch_s=7e-6,
        all_to_all_efficiency=0.6,
        peak_flops_per_s={**base.peak_flops_per_s, "bfloat16": 5e14},
    )
    samples = synthetic(true)
    calibration = Calibration(MACHINE, base, samples, fit_all(samples))
    path, samples_path = write(calibration, tmp_path / "new" / "mine.toml")
    found = hardware.load(path)
    assert found.name == "mine"
    assert found.host_link.bytes_per_s == pytest.approx(3.21e11, rel=1e-3)
    assert found.host_link.latency_s == pytest.approx(1.5e-6, rel=1e-2)
    assert found.collective_launch_s == pytest.approx(7e-6, rel=1e-2)
    assert found.all_to_all_efficiency == pytest.approx(0.6, rel=1e-2)
    # The fit gives the true rate, and the largest matmul reaches 1.5 % less.
    assert found.matrix_rate("bfloat16") == pytest.approx(true.matrix_rate("bfloat16"), rel=0.02)
    fastest = max(one.counts["flops"] / one.seconds for one in samples if one.group == "matmul bfloat16")
    assert found.matrix_rate("bfloat16") == pytest.approx(fastest, rel=1e-3)
    # There are no samples of it, so the figure comes from the base, and `source` says so.
    assert found.matrix_rate("float64") == pytest.approx(base.matrix_rate("float64"))
    assert found.network_link == base.network_link
    assert found.hbm_bytes == base.hbm_bytes
    assert (found.cache_bytes, found.near_cache_bytes) == (base.cache_bytes, base.near_cache_bytes)
    assert found.operations == base.operations
    assert found.xla_target == base.xla_target
    assert "NOT measured: bytes_per_s, latency_s, taken from `h100-sxm`" in found.sources["links.network"]
    assert "peak_flops_per_s.float64" in found.sources["compute"].partition("NOT measured")[2]
    assert "measured by `autopar calibrate` on 8 gpu devices" in found.sources["links.host"]
    # The other file has all the data behind the profile.
    data = json.loads(samples_path.read_text(encoding="utf-8"))
    assert len(data["samples"]) == len(samples)
    assert data["profile"] == profile_table(calibration, "mine")
    assert data["mean_error_as_priced"]["all-gather"] < 0.01
    assert {each["group"] for each in data["fits"]} == {*KINDS, "link", "matmul bfloat16", "matmul float32"}
    assert {file.name for file in path.parent.iterdir()} == {"mine.toml", "mine.json"}
    assert "all-to-all" in describe(calibration)


def test_flops_per_element_are_scaled_to_the_fitted_rate() -> None:
    """The fit counts a tanh as 10 FLOPs. A GPU's rate is that of its instructions, and is not fitted."""
    gpu, samples = hardware.load("h100-sxm"), []
    base = replace(hardware.load("cpu-host"), operations=gpu.operations)
    for size in (2.0**20, 2.0**22, 2.0**24, 2.0**26):
        for flops in (2.0, 12.0, 96.0):
            counts = {"launch": 1.0, "flops": flops * size, "bytes": 12 * size}
            samples.append(Sample("memory", f"{size:g}", counts, counts["flops"] / 4e12 + counts["bytes"] / 3e12))
    table = profile_table(Calibration(MACHINE, base, tuple(samples), fit_all(samples)), "mine")
    assert table["compute"]["vector_flops_per_s"] == pytest.approx(4e12, rel=0.01)
    assert table["operations"]["tanh"] == pytest.approx(10)
    assert table["operations"]["exp"] == pytest.approx(10 * 79 / 467, rel=1e-3)
    assert "so that a tanh counts 10" in table["operations"]["source"]
    table = profile_table(Calibration(MACHINE, gpu, tuple(samples), fit_all(samples)), "mine")
    assert table["compute"]["vector_flops_per_s"] == gpu.vector_flops_per_s
    assert table["operations"]["tanh"] == gpu.operations["tanh"]


def test_toml_keeps_texts_and_nested_tables() -> None:
    import tomllib

    table = {"a": 'quote " and \\ and é', "b": {"c": [[1, 2.5], ["x"]], "d": {"e": True, "f": 1e-12}}}
    assert tomllib.loads(toml(table)) == table


def test_a_profile_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"give -o a \.toml file"):
        calibrate(tmp_path / "profile.json", seconds=1e9)
    with pytest.raises(HardwareError, match="unknown hardware 'nothing'"):
        calibrate(tmp_path / "profile.toml", base="nothing", seconds=1e9)


@pytest.mark.parametrize("path", sorted(CALIBRATED.glob("*.json")), ids=lambda path: path.stem)
def test_the_accuracy_page_states_the_errors_of_the_committed_runs(path: Path) -> None:
    assert hardware.load(path.with_suffix(".toml")).name == path.stem
    page = (CALIBRATED.parent / "accuracy.md").read_text(encoding="utf-8")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert f"`{data['machine']['command']}" in page
    for each in data["fits"]:
        stated = f"| {each['group']} | {each['num_samples']} | {each['mean_error']:.0%} | {each['worst_error']:.0%} |"
        assert stated in page, f"cost_models/accuracy.md lacks {stated!r}"


# -- on the devices of this machine -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.contract
def test_a_small_run_makes_a_profile_that_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    found, path, samples_path = calibrate(
        tmp_path / "here.toml", seconds=5, sizes=TINY, progress=lambda stage, _: stages.append(stage)
    )
    profile = hardware.load(path)
    assert profile.platform == "cpu"
    assert profile.device_kinds == ("cpu",)
    assert found.machine.num_devices == 8
    assert {s.group for s in found.samples} & set(KINDS), "8 devices have collectives"
    assert all(s.seconds > 0 and len(s.runs_s) >= 3 for s in found.samples)
    assert stages[0] == "launch"
    assert json.loads(samples_path.read_text(encoding="utf-8"))["machine"]["num_devices"] == 8


def test_every_collective_is_in_its_program() -> None:
    """XLA neither removes nor combines repetitions of the timed collective."""
    for kind in KINDS:
        mesh = probes._mesh(jax.devices(), 4)
        split = jax.sharding.PartitionSpec(mesh.axis_names)
        mapped = jax.shard_map(
            lambda x, kind=kind: probes._communicate(kind, 4, 3, x[0])[None],
            mesh=mesh,
            in_specs=split,
            out_specs=split,
            check_vma=False,
        )
        text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 64), "float32")).compile().as_text()
        assert text is not None
        assert text.count(f" {kind}(") == 3, kind
    points = list(collective_points(jax.devices(), TINY, hardware.load("cpu-host")))
    assert len(points) == len(KINDS) * 3 * len(TINY.payload_bytes)


def test_a_short_budget_drops_the_last_dtypes_first() -> None:
    points = list(matmul_points(jax.devices(), GPU_SIZES, hardware.load("h100-sxm")))
    dtypes = [point.group.removeprefix("matmul ") for point in points]
    main = len(GPU_SIZES.products) * 3
    assert set(dtypes[:main]) == {"bfloat16", "float32", "float8"}
    assert dtypes[:3] == dtypes[3:6], "all dtypes of a shape before the next shape"
    assert set(dtypes) == set(DTYPES)
    assert len(dtypes) == len(GPU_SIZES.products) * len(DTYPES)


def test_a_program_whose_times_agree_runs_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    steady = [9.0] + [1.0] * 100
    unsteady = [9.0, *([1.0, 2.0] * 50)]
    of = {"steady": iter(steady), "unsteady": iter(unsteady)}
    monkeypatch.setattr(measure, "_timed", lambda name: next(of[name]))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    calls: Any = ["steady", "unsteady"]
    runs = measure._rounds(calls, 1e9, lambda: None)
    assert [len(times) for times in runs] == [measure._ENOUGH_ROUNDS, measure._MOST_ROUNDS]
    assert 9.0 not in runs[0] + runs[1], "the first round is a warm-up"
    of |= {"steady": iter(steady), "unsteady": iter(unsteady)}
    assert [len(times) for times in measure._rounds(calls, 0.0, lambda: None)] == [measure._FEWEST_ROUNDS] * 2


def test_wide_matmuls_keep_their_float32_results() -> None:
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 32), (32, 48))]
    text = jax.jit(partial(probes._wide_products, 3)).lower(*arrays).as_text()
    assert text.count("(tensor<64x32xbf16>, tensor<32x48xbf16>) -> tensor<64x48xf32>") == 3
    assert text.count("stablehlo.optimization_barrier") == 3


@pytest.mark.parametrize(
    ("chain", "shapes", "operation"),
    {
        "convolution": (layer_probes._convolutions, [(1, 8, 8, 4), (3, 3, 4, 4)], " convolution("),
        "gradient": (layer_probes._kernel_gradients, [(1, 8, 8, 4), (3, 3, 4, 4)], " convolution("),
        "attention": (partial(layer_probes._attention_chain, "xla"), [(1, 16, 2, 8)] * 3, " exponential("),
        "with gradients": (partial(layer_probes._attention_and_gradients, "xla"), [(1, 16, 2, 8)] * 3, " exponential("),
    }.values(),
    ids=("convolution", "gradient", "attention", "with gradients"),
)
def test_every_layer_is_in_its_program_as_often_as_it_is_counted(
    chain: Any, shapes: list[tuple[int, ...]], operation: str
) -> None:
    """Each repetition depends on the previous one; otherwise XLA would compute it once."""
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    compiled = jax.jit(partial(chain, 3)).lower(*arrays).compile().as_text()
    assert compiled is not None
    assert compiled.count(operation) >= 3


def test_copies_are_of_new_arrays_each_time() -> None:
    copy = probes._to_host(np.arange(8, dtype=np.float32), jax.devices()[0])
    first, second = copy(), copy()
    assert np.array_equal(np.asarray(first), np.arange(8))
    assert np.array_equal(np.asarray(second), np.arange(8))
    assert first is not second


@pytest.mark.parametrize("moment", ["measuring", "writing"])
def test_an_interrupt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    def interrupt(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    if moment == "measuring":
        monkeypatch.setattr(calibrate_module, "measure", interrupt)
    else:
        monkeypatch.setattr(calibrate_module, "measure", lambda *_: (synthetic(hardware.load("h100-sxm")), ()))
        monkeypatch.setattr(Path, "replace", interrupt)
    assert main(["calibrate", "-o", str(tmp_path / "mine.toml")]) == 130
    assert list(tmp_path.iterdir()) == []
