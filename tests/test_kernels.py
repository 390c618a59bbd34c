"""Prices of kernels and collectives compared with XLA's logged estimates for small programs (JAX 0.12.0.1, H100), and
with measured kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cost.kernel_time import UNALIGNED, bounds, op_seconds
from autopar.cost.scatter_traffic import accessed_bytes
from autopar.errors import HardwareError
from autopar.hardware.profile import known_names, load
from autopar.hardware.xla_estimator import EstimatorProfile
from autopar.ir.device_program import Gemm, Op
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import MeshShape, parse_mesh
from autopar.xla_model.latency_estimator import (
    collective_seconds,
    column_blocks,
    cycles,
    estimated_seconds,
    fusion_seconds,
    gemm_seconds,
    is_small,
)

H100 = load("h100-sxm")
HOST = parse_mesh("x=8")
HOSTS = parse_mesh("h=2,g=8")


def estimator(name: str = "h100-sxm") -> EstimatorProfile:
    found = load(name).xla_estimator
    assert found is not None
    return found


def fusion(read: float, written: float, flops: float, blocks: float = 0.0) -> Op:
    return Op("fusion", 0, (0,), (1,), read, written, counted_flops=flops, num_blocks=blocks)


def microseconds(seconds: float) -> float:
    return seconds * 1e6


# XLA's log: kernel, bytes read and written, operations, blocks (0: many), microseconds.
FUSIONS = [
    ("add, float32", 16842752, 8421376, 3 * 2056 * 1024, 0, 7.54075),
    ("exp, float32", 8585216, 8585216, 86 * 2096 * 1024, 0, 5.26),
    ("gelu by tanh, float32", 9666560, 9666560, 214 * 2360 * 1024, 0, 8.01775),
    ("pow, float32", 18219008, 9109504, 925 * 2224 * 1024, 0, 31.892),
    ("sum along rows, float32", 9568256, 9344, 3069 * 2336, 0, 2.86225),
    ("sum down columns, float32", 9601024, 4096, 7029 * 1024, 16, 9.51625),
    ("sum down columns, bfloat16", 5832704, 2048, 17088 * 1024, 8, 11.7233),
]


@pytest.mark.parametrize(("name", "read", "written", "flops", "blocks", "told"), FUSIONS, ids=[f[0] for f in FUSIONS])
def test_fusions(name: str, read: float, written: float, flops: float, blocks: float, told: float) -> None:
    found = fusion_seconds(fusion(read, written, flops, blocks), estimator())
    assert microseconds(found) == pytest.approx(told, rel=0.01)


def test_what_is_read_again_comes_from_a_cache() -> None:
    """The estimate of a gelu whose two results each read both operands."""
    op = Op(
        "fusion", 0, (0, 1), (2, 3), 25165824, 33554432, counted_flops=1845493760, reread_bytes=25165824, num_blocks=8192
    )  # fmt: skip
    assert microseconds(fusion_seconds(op, estimator())) == pytest.approx(28.6085, rel=0.01)


# Matmuls of three steps on an H100 (benchmarks/results/kernels.md): batch, m, n, k; alignment of the rows; microseconds.
MEASURED = [
    ((1, 16384, 50257, 768), (16, 2, 2), 6378),
    ((1, 16384, 768, 50257), (2, 2, 16), 7392),
    ((1, 768, 50257, 16384), (16, 2, 2), 4641),
    ((1, 32768, 30522, 768), (16, 4, 4), 4046),
    ((1, 32768, 768, 30522), (4, 4, 16), 6608),
    ((1, 768, 30522, 32768), (16, 4, 4), 2769),
    ((1, 8192, 32000, 2048), (16, 16, 16), 1354),
    ((1, 16384, 3072, 768), (16, 16, 16), 104.3),
    ((64, 2048, 2048, 128), (16, 16, 16), 219.9),
]


@pytest.mark.parametrize(("sizes", "aligned", "measured_us"), MEASURED)
def test_matmuls_take_what_was_measured(
    sizes: tuple[int, int, int, int], aligned: tuple[int, int, int], measured_us: float
) -> None:
    batch, m, n, k = sizes
    gemm = Gemm(batch, m, n, k, "bfloat16", "bfloat16", aligned)
    op = Op("gemm", 0, (0, 1), (2,), 2.0 * batch * (m * k + k * n), 2.0 * batch * m * n, gemm=gemm)
    assert microseconds(op_seconds(op, HOST, H100)) == pytest.approx(measured_us, rel=0.3)
    lost_s = dict(bounds(op, H100)).get(UNALIGNED, 0.0)
    assert (lost_s > 0.4 * op_seconds(op, HOST, H100)) == (min(aligned) < 16)


# Scatters of two steps on an H100 (benchmarks/results/kernels.md): rows, columns; microseconds.
@pytest.mark.parametrize(("rows", "columns", "measured_us"), [(16384, 768, 135.4), (8192, 2048, 172.7)])
def test_scatters_take_what_was_measured(rows: int, columns: int, measured_us: float) -> None:
    node, updates = scatter("scatter-add", (1,)), Value((rows, columns), "bfloat16", 2.0)
    num_bytes = rows * columns * updates.itemsize
    op = Op("fusion", 0, (0, 1), (2,), num_bytes, num_bytes)
    op = replace(op, indexed_bytes=rows * columns * accessed_bytes(node, updates))
    assert microseconds(op_seconds(op, HOST, H100)) == pytest.approx(measured_us, rel=0.2)


def test_a_scatter_accesses_sectors_or_words() -> None:
    rows, words = Value((64, 512), "float32", 4.0), Value((64, 512), "bfloat16", 2.0)
    assert accessed_bytes(scatter("scatter-add", (1,)), rows) == 2 * 4
    assert accessed_bytes(scatter("scatter-add", ()), rows) == 2 * 32
    assert accessed_bytes(scatter("scatter-max", (1,)), words) == 2 * 32 / 2
    assert accessed_bytes(scatter("scatter-add", (1,)), Value((64, 2), "float32", 4.0)) == 2 * 16
    assert accessed_bytes(scatter("scatter-add", (1,)), Value((64, 0), "float32", 4.0)) == 2 * 32
    assert accessed_bytes(scatter("scatter-add", ()), Value((), "float32", 4.0)) == 2 * 32
    assert accessed_bytes(scatter("scatter", (1,)), words) == 0, "it reads nothing"


def scatter(primitive: str, window: tuple[int, ...]) -> Node:
    return Node(primitive, {"dimension_numbers": {"update_window_dims": window}}, (0, 1, 2), (3,))


# Fitted: XLA's figure, and how far the fit may be off.
GEMMS = [
    (Gemm(1, 1024, 4096, 1024, "bfloat16", "bfloat16"), 17.376),
    (Gemm(1, 1024, 1024, 4096, "bfloat16", "bfloat16"), 18.176),
    (Gemm(1, 1024, 1024, 1024, "bfloat16", "bfloat16"), 8.496),
    (Gemm(1, 8192, 768, 50257, "bfloat16", "bfloat16"), 894.68),
    (Gemm(1, 1024, 8192, 4096, "float32", "float32"), 210.912),
    (Gemm(1, 64, 2048, 1024, "bfloat16", "bfloat16"), 1.896),
    # Where result and operands differ, or the dtype is in no table, XLA errs by a cube.
    (Gemm(1, 1024, 2048, 1024, "bfloat16", "float32"), 378.88),
    (Gemm(1, 1024, 2048, 1024, "float16", "float16"), 89.472),
]


@pytest.mark.parametrize(("gemm", "told"), GEMMS, ids=[f"{g.m}x{g.n}x{g.k}-{g.dtype}-{g.out_dtype}" for g, _ in GEMMS])
def test_gemms(gemm: Gemm, told: float) -> None:
    assert microseconds(gemm_seconds(gemm, estimator())) == pytest.approx(told, rel=0.1)


def test_gemms_outside_the_table_take_time_in_proportion() -> None:
    large = Gemm(1, 8192, 8192, 8192, "bfloat16", "bfloat16")
    assert gemm_seconds(replace(large, k=16384), estimator()) == pytest.approx(2 * gemm_seconds(large, estimator()))


# XLA's log: kind, bytes, axes, mesh, microseconds, how far off.
COLLECTIVES = [
    # One kernel: formulas, so nearly exact.
    ("all-reduce", 65536, ("x",), HOST, 3.81325, 0.01),
    ("all-reduce", 1 << 20, ("x",), HOST, 9.7225, 0.01),
    ("all-reduce", 4 << 20, ("x",), HOST, 26.8912, 0.01),
    ("all-reduce", 1 << 20, ("y",), parse_mesh("x=4,y=2"), 6.03825, 0.01),
    # From the table: fitted.
    ("all-reduce", 5 << 20, ("x",), HOST, 85.84, 0.15),
    ("all-reduce", 100 << 20, ("x",), HOST, 523.55, 0.1),
    ("all-gather", 48 << 20, ("x",), HOST, 160.176, 0.1),
    ("reduce-scatter", 100 << 20, ("x",), HOST, 321.5, 0.1),
    ("all-to-all", 1 << 30, ("x",), HOST, 2796.51, 0.1),
    ("collective-permute", 1 << 30, ("x",), HOST, 3706.16, 0.1),
    # Between hosts, XLA told how many devices a host has: formulas.
    ("all-reduce", 48 << 20, ("h", "g"), HOSTS, 697.972, 0.01),
    ("all-gather", 100 << 20, ("h", "g"), HOSTS, 721.287, 0.01),
    ("all-to-all", 100 << 20, ("h", "g"), HOSTS, 2744.31, 0.01),
    ("all-reduce", 100 << 20, ("h",), HOSTS, 4625.63, 0.01),
    ("reduce-scatter", 48 << 20, ("h",), HOSTS, 1181.55, 0.01),
    ("collective-permute", 100 << 20, ("h",), HOSTS, 4587.45, 0.01),
    ("all-reduce", 48 << 20, ("g",), HOSTS, 284.856, 0.1),
]


@pytest.mark.parametrize(
    ("kind", "num_bytes", "axes", "mesh", "told", "off"),
    COLLECTIVES,
    ids=[f"{c[0]}-{c[1]}-{''.join(c[2])}-{c[3]}" for c in COLLECTIVES],
)
def test_collectives(
    kind: str, num_bytes: float, axes: tuple[str, ...], mesh: MeshShape, told: float, off: float
) -> None:
    found = collective_seconds(kind, num_bytes, axes, mesh, H100)
    assert microseconds(found) == pytest.approx(told, rel=off)


def test_merged_all_reduces_are_no_kernel_of_their_own() -> None:
    alone, merged = (
        collective_seconds("all-reduce", 1 << 20, ("x",), HOST, H100, num_buffers=count) for count in (1, 2)
    )
    assert merged > 3 * alone


def test_only_a_small_all_reduce_within_a_host_is_a_kernel_of_xla() -> None:
    def small(axis: str) -> bool:
        reduced = Op(
            "collective", 0, (0,), (1,), 0.0, 0.0, collective="all-reduce", payload_bytes=1 << 20, axes=(axis,)
        )
        return is_small(reduced, HOSTS, H100)

    assert small("g") and not small("h")


def test_an_axis_of_one_device_costs_nothing() -> None:
    assert collective_seconds("all-reduce", 1e9, ("x",), parse_mesh("x=1,y=8"), H100) == 0.0


def test_fixed_prices_are_the_estimators_and_no_others() -> None:
    """It has 10 us for a convolution of any size. By the device's own rates one takes its arithmetic."""
    library = Op("convolution", 0, (0,), (1,), 1e9, 1e9, matrix_flops=(("bfloat16", 1e15),))
    free = Op("fusion", 0, (0,), (1,), 1e9, 1e9, unpriced=True)
    view = Op("view", 0, (0,), (1,), 0.0, 0.0)
    assert [estimated_seconds(op, HOST, H100) for op in (library, free, view)] == [10e-6, 1e-8, 0.0]
    own = op_seconds(library, HOST, H100)
    seconds = 1e15 / H100.matrix_rate("bfloat16") / H100.convolution_efficiency
    assert own == pytest.approx(seconds + H100.kernel_launch_s + H100.kernel_gap_s)


def test_cycles_know_short_floats() -> None:
    assert cycles("exp", "float32", estimator()) > 20 * cycles("exp", "bfloat16", estimator())
    assert cycles("no such primitive", "float32", estimator()) == estimator().cycles["default"]


def test_few_columns_make_few_blocks() -> None:
    assert column_blocks(2048, 1024, 4) == 16
    assert column_blocks(2048, 1024, 2) == 8
    assert column_blocks(1, 512, 2, num_outer=64) == 256


@pytest.mark.parametrize("name", ["h100-sxm", "h200", "b200"])
def test_estimators_are_sane(name: str) -> None:
    told = estimator(name)
    for dtype in ("bfloat16", "float32"):
        rate = 2 * 4096**3 / gemm_seconds(Gemm(1, 4096, 4096, 4096, dtype, dtype), told)
        peak = load(name).peak_flops_per_s[dtype]
        assert 0.5 * peak < rate < 1.1 * peak
    for kind in told.collectives:
        seconds = [collective_seconds(kind, 2.0**power, ("x",), HOST, load(name)) for power in range(23, 31)]
        assert seconds == sorted(seconds)


def test_devices_without_an_estimator_are_priced_by_their_rates() -> None:
    for name in known_names():
        profile = load(name)
        op = Op("gemm", 0, (0, 1), (2,), 1e6, 1e6, gemm=Gemm(1, 1024, 1024, 1024, "bfloat16", "bfloat16"))
        seconds = op_seconds(op, HOST, profile)
        assert math.isfinite(seconds) and seconds > 0
        if profile.xla_estimator is None:
            assert seconds >= 2 * 1024**3 / profile.matrix_rate("bfloat16")


def test_a_damaged_estimator_is_refused(tmp_path) -> None:
    text = (load.__globals__["_data_folder"]() / "h200.toml").read_text(encoding="utf-8")
    (tmp_path / "damaged.toml").write_text(text.replace("custom_call_s = ", "custom_coal_s = "), encoding="utf-8")
    with pytest.raises(HardwareError, match="xla_estimator"):
        load(tmp_path / "damaged.toml")
