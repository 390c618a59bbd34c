"""Kernel and collective times of the replay: they grow with the work, and agree with published measurements."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import HardwareError
from autopar.xla_replay import rates as replay_rates
from autopar.xla_replay.collective_time import KINDS, collective_s
from autopar.xla_replay.gemm_time import gemm_s
from autopar.xla_replay.kernel_time import (
    KernelWork,
    attention_s,
    cached_bytes,
    convolution_s,
    copy_s,
    custom_call_s,
    fusion_s,
    host_transfer_s,
)
from autopar.xla_replay.rates import ReplayRates
from benchmarks.replay import fit, tables, xla_tables
from benchmarks.replay.fit import Sample
from benchmarks.replay.xla_tables import Collective

MIB = 1 << 20
PROFILES = replay_rates.known_names()


@pytest.fixture(scope="module")
def h100() -> ReplayRates:
    return replay_rates.load("h100-sxm")


def gemm(rates: ReplayRates, m: int, n: int, k: int, dtype: str = "bf16", out: str = "bf16", batch: int = 1) -> float:
    return gemm_s(rates, batch=batch, m=m, n=n, k=k, lhs_dtype=dtype, rhs_dtype=dtype, out_dtype=out)


def collective(rates: ReplayRates, kind: str, num_bytes: float, local: int = 8, domains: int = 1) -> float:
    return collective_s(rates, kind, num_bytes, devices_per_domain=local, num_domains=domains)


# -- published figures ------------------------------------------------------------------------


def test_gemm_of_4096_takes_what_others_measured(h100: ReplayRates) -> None:
    assert gemm(h100, 4096, 4096, 4096) == pytest.approx(180e-6, rel=0.1)


def test_float32_output_costs_only_its_bytes(h100: ReplayRates) -> None:
    narrow, wide = gemm(h100, 4096, 4096, 4096), gemm(h100, 4096, 4096, 4096, out="f32")
    more_bytes_s = 2 * 4096**2 / h100.device.hbm_bytes_per_s
    assert narrow < wide < narrow + 2 * more_bytes_s


def test_large_gemms_stay_below_the_peak() -> None:
    for profile in PROFILES:
        rates = replay_rates.load(profile)
        for dtype in ("bf16", "f16", "f32", "f8e4m3fn", "s8"):
            achieved = 2 * 8192**3 / gemm(rates, 8192, 8192, 8192, dtype)
            peak = rates.gemm[{"f8e4m3fn": "f8"}.get(dtype, dtype)].peak_flops_per_s
            assert 0.6 * peak < achieved < peak, (profile, dtype)


def test_decoding_gemm_is_bound_by_memory(h100: ReplayRates) -> None:
    weights = 2 * 8192 * 28672
    assert gemm(h100, 1, 28672, 8192) == pytest.approx(weights / h100.device.hbm_bytes_per_s, rel=0.3)


def test_all_reduce_reaches_the_bus_bandwidth_of_xlas_table(h100: ReplayRates) -> None:
    """256 MiB on 8 GPUs: 1.26 ms in XLA's table; nccl-tests with registered buffers are faster, about 1 ms."""
    assert collective(h100, "all-reduce", 256 * MIB) == pytest.approx(1.26e-3, rel=0.1)


def test_hosts_are_bound_by_their_network(h100: ReplayRates) -> None:
    """All-reduces of 1 GiB over 16 hosts reach 320 to 390 GB/s of bus bandwidth with eight 400 Gb/s cards each."""
    seconds = collective(h100, "all-reduce", 1024 * MIB, 8, 16)
    assert 320e9 < 2 * 127 / 128 * 1024 * MIB / seconds < 390e9
    assert collective(h100, "collective-permute", 256 * MIB, 1, 2) > 256 * MIB / 50e9


def test_attention_reaches_what_cudnn_does(h100: ReplayRates) -> None:
    """Causal attention, as the calibration of an H100 has it (benchmarks/results/gpu.md)."""
    batch, heads, sequence, head_dim = 4, 16, 2048, 128
    flops, num_bytes = 2.0 * batch * heads * sequence**2 * head_dim, 4.0 * batch * heads * sequence * head_dim * 2
    sizes: dict[str, Any] = {"head_dim": head_dim, "sequence": sequence, "masked": True}
    forward = attention_s(h100, flops=flops, num_bytes=num_bytes, **sizes)
    assert flops / forward == pytest.approx(449e12, rel=0.05)
    backward = attention_s(h100, flops=2.5 * flops, num_bytes=2 * num_bytes, backward=True, **sizes)
    assert 2.5 * flops / backward == pytest.approx(376e12, rel=0.05)


def test_a_large_copy_reaches_memory_bandwidth(h100: ReplayRates) -> None:
    assert 2e9 / copy_s(h100, 1e9) == pytest.approx(3.02e12, rel=0.05)


def test_a_convolution_takes_a_share_of_the_tensor_cores(h100: ReplayRates) -> None:
    """3 x 3 over 256 images of 56 x 56 with 256 features: 0.95 TFLOP, not the 16 us that XLA's estimator charges."""
    flops = 2.0 * 256 * 56 * 56 * 9 * 256 * 256
    seconds = convolution_s(
        h100,
        output_positions=256 * 56 * 56,
        input_features=256,
        output_features=256,
        window_elements=9,
        dtype="bf16",
        out_dtype="bf16",
    )
    assert 0.4 * 989e12 < flops / seconds < 0.9 * 989e12


# -- more work takes no less time --------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_gemms_grow_with_every_dimension(profile: str) -> None:
    """Up to the waves that a smaller GEMM leaves partly empty."""
    rates = replay_rates.load(profile)
    sizes = (1, 64, 200, 1024, 3000, 8192)
    for fixed in ((64, 64), (4096, 1024), (8192, 8192)):
        for place in range(3):
            shapes = [(*fixed[:place], size, *fixed[place:]) for size in sizes]
            seconds = [gemm(rates, m, n, k) for m, n, k in shapes]
            assert all(later >= 0.97 * earlier for earlier, later in itertools.pairwise(seconds)), (fixed, place)
    assert gemm(rates, 512, 512, 512, batch=16) > gemm(rates, 512, 512, 512)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_grow_with_bytes(profile: str, kind: str) -> None:
    rates = replay_rates.load(profile)
    for local, domains in ((2, 1), (rates.domain_size, 1), (1, 4), (rates.domain_size, 4)):
        seconds = [collective(rates, kind, 2.0**power, local, domains) for power in range(8, 33)]
        assert all(later >= earlier for earlier, later in itertools.pairwise(seconds)), (local, domains)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "collective-broadcast"])
def test_collectives_grow_with_devices(profile: str, kind: str) -> None:
    """Not where the switch takes over: NVLS needs three devices."""
    rates = replay_rates.load(profile)
    for num_bytes in (1 << 12, MIB, 64 * MIB, 1024 * MIB):
        hosts = [collective(rates, kind, num_bytes, rates.domain_size, count) for count in (1, 2, 4, 16, 64)]
        assert all(later >= 0.999 * earlier for earlier, later in itertools.pairwise(hosts))
        devices = [collective(rates, kind, num_bytes, count) for count in (3, 4, 6, 8)]
        assert all(later >= 0.999 * earlier for earlier, later in itertools.pairwise(devices))


def test_a_larger_domain_is_faster_than_several(h100: ReplayRates) -> None:
    rates = replay_rates.load("gb200-nvl72")
    seconds = [collective(rates, "all-gather", 256 * MIB, 72 // domains, domains) for domains in (1, 9, 18)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_many_hosts_gather_in_few_steps(h100: ReplayRates) -> None:
    few, many = (collective(h100, "all-gather", 1 << 10, 1, hosts) for hosts in (64, 256))
    assert many < few + 2 * 14e-6 + 2 * h100.link.skew_s + 1e-6


def test_halved_links_double_large_collectives(h100: ReplayRates) -> None:
    whole = collective_s(h100, "all-gather", 1024 * MIB, devices_per_domain=8, num_domains=4)
    half = collective_s(h100, "all-gather", 1024 * MIB, devices_per_domain=8, num_domains=4, share=0.5)
    assert half == pytest.approx(2 * whole, rel=0.1)


def test_neighbours_that_only_send_are_not_slower(h100: ReplayRates) -> None:
    for num_bytes in (1 << 12, 8 * MIB, 128 * MIB, 1024 * MIB):
        one_way, exchange, shift = (
            collective_s(h100, "collective-permute", num_bytes, devices_per_domain=8, num_domains=1, pattern=pattern)
            for pattern in ("one-way", "exchange", "shift")
        )
        assert one_way <= exchange <= shift


def test_fusions_grow_with_bytes_and_operations(h100: ReplayRates) -> None:
    def elementwise(count: float, opcode: str = "add", dtype: str = "f32") -> KernelWork:
        return KernelWork(4 * count, 4 * count, {(opcode, dtype): count}, count)

    seconds = [fusion_s(h100, elementwise(4.0**power)) for power in range(15)]
    assert all(later >= earlier for earlier, later in itertools.pairwise(seconds))
    add, tanh, double, unknown = (
        fusion_s(h100, dataclasses.replace(elementwise(1e8), operations={(opcode, dtype): 1e10}))
        for opcode, dtype in (("add", "f32"), ("tanh", "f32"), ("add", "f64"), ("a-new-opcode", "f32"))
    )
    assert add < double < tanh
    assert unknown > add


def test_access_patterns_and_the_cache(h100: ReplayRates) -> None:
    plain = KernelWork(64e6, 64e6, num_elements=16e6)
    seconds = fusion_s(h100, plain)
    for field in ("transpose", "column_reduction", "gather"):
        assert fusion_s(h100, dataclasses.replace(plain, **{field: True})) > seconds
    assert fusion_s(h100, dataclasses.replace(plain, scatter_updates=1e8)) > seconds
    small = KernelWork(8e6, 8e6, num_elements=2e6)
    assert fusion_s(h100, dataclasses.replace(small, cached_bytes=8e6)) < fusion_s(h100, small)
    assert cached_bytes(h100, 8e6, 8e6) == 8e6
    assert cached_bytes(h100, 8e6, 1e9) == 0
    assert 0 < cached_bytes(h100, 8e6, 20e6) < 8e6
    assert cached_bytes(h100, 1e9, 1e9) <= h100.device.l2_bytes


def test_narrow_groups_are_not_run_as_wide_gemms(h100: ReplayRates) -> None:
    def grouped(groups: int) -> float:
        return convolution_s(
            h100,
            output_positions=64 * 56 * 56,
            input_features=256,
            output_features=256,
            window_elements=9,
            groups=groups,
            dtype="bf16",
            out_dtype="bf16",
        )

    assert grouped(256) < 1.5 * grouped(1)


# -- the comparison with XLA's tables -----------------------------------------------------------


def sample(num_bytes: int, seconds: float, kind: str = "all-gather", num_devices: int = 8) -> Sample:
    return Sample(kind, (num_bytes,), seconds, Collective(kind, num_devices, num_bytes, seconds))


def test_a_fold_holds_out_whole_sizes() -> None:
    samples = [sample(1 << size, size * 1e-6, kind) for size in range(10, 30) for kind in ("all-gather", "all-reduce")]
    held: list[int] = []

    def predict(train: Sequence[Sample], test: Sequence[Sample]) -> list[float]:
        assert not {one.shape for one in train} & {one.shape for one in test}
        assert len(train) + len(test) == len(samples)
        held.extend(one.shape[0] for one in test)
        return [one.seconds for one in test]

    measured, predicted = tables.held_out(samples, predict)
    assert list(measured) == list(predicted)
    assert sorted(held) == sorted(one.shape[0] for one in samples)


def test_rows_that_no_growing_time_meets_are_contradicted() -> None:
    seconds = [10e-6, 90e-6, 10.5e-6, 9.8e-6, 30e-6, 20e-6, 60e-6]
    rows = [sample(1 << size, time) for size, time in enumerate(seconds)]
    kept = tables.consistent_rows(rows)
    assert kept[0] and not kept[1] and kept[2] and kept[3] and kept[6]
    assert kept[4] != kept[5]
    assert all(tables.consistent_rows(rows, tolerance=0.9))
    assert all(tables.consistent_rows([*rows[:1], sample(2, 1e-6, "all-reduce")]))


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins.xla_cuda12") is None, reason="needs the CUDA plugin wheel")
def test_shipped_constants_are_those_of_the_fit() -> None:
    binary = xla_tables.plugin()
    for profile, device in fit.DEVICES.items():
        rates = replay_rates.load(profile)
        gemms = xla_tables.read_gemms(binary, device)
        for dtype in fit.FITTED_DTYPES[profile]:
            samples = fit.gemm_samples(gemms, dtype)
            # Two constants of an H100's float32 are a calibration's, which is faster than the table.
            most = 0.2 if (profile, dtype) == ("h100-sxm", "f32") else 0.1
            assert error(samples, fit.predict_gemms(rates, rates.gemm[dtype], dtype, samples)) < most
        collectives = fit.collective_samples(xla_tables.read_collectives(binary, device))
        assert len(collectives) == 330
        assert error(collectives, fit.predict_collectives(rates, rates.link, collectives)) < 0.1


def error(samples: Sequence[Sample], predicted: Any) -> float:
    return statistics.median(abs(found / one.seconds - 1) for one, found in zip(samples, predicted, strict=True))


# -- edges ------------------------------------------------------------------------------------


def test_empty_work_takes_no_time(h100: ReplayRates) -> None:
    assert gemm(h100, 0, 8, 8) == 0
    assert fusion_s(h100, KernelWork(0, 0, num_elements=0)) == 0
    assert copy_s(h100, 0) == host_transfer_s(h100, 0) == custom_call_s(h100, flops=0, num_bytes=0) == 0
    assert all(collective(h100, kind, 0) == 0 for kind in KINDS)


def test_tiny_work_takes_a_launch(h100: ReplayRates) -> None:
    assert 4e-6 < gemm(h100, 1, 1, 1) < 7e-6
    assert gemm(h100, 8, 8, 0) > 0
    assert 0.8e-6 < fusion_s(h100, KernelWork(4, 4, {("add", "f32"): 1}, 1)) < 2e-6
    assert all(5e-6 < collective(h100, kind, 4) < 60e-6 for kind in KINDS)
    assert all(0 < collective(h100, kind, 4, 1, 1) < 60e-6 for kind in KINDS)


@pytest.mark.parametrize("dtype", ["f8e5m2", "s4", "pred", "u8", "f64", "c64", "s32", "f4e2m1fn"])
def test_other_dtypes_have_a_time(h100: ReplayRates, dtype: str) -> None:
    assert gemm(h100, 512, 512, 512, dtype) > 0


def test_unknown_dtype_kind_group_and_device(h100: ReplayRates, tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="no HLO dtype 'bfloat16'; known: bf16"):
        gemm(h100, 8, 8, 8, "bfloat16")
    with pytest.raises(HardwareError, match="no collective 'psum'; HLO has all-reduce"):
        collective(h100, "psum", 8)
    with pytest.raises(HardwareError, match="both counts must be positive"):
        collective(h100, "all-reduce", 8, 0)
    with pytest.raises(HardwareError, match=r"no replay rates for 'h100'\. Did you mean '.*h100.*'\? Known: .*b200"):
        replay_rates.load("h100")
    with pytest.raises(HardwareError, match="no replay rates for"):
        replay_rates.load(tmp_path / "mine.toml")


def test_damaged_files_name_what_is_wrong(tmp_path: Path) -> None:
    def written(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    block = 'source = "a guess"\ndate = "2026-11-26"\n'
    mine = replay_rates.load(written(f'inherits = "h100-sxm"\n[device]\n{block}hbm_bytes_per_s = 1e12\n'))
    assert mine.device.hbm_bytes_per_s == 1e12
    assert mine.device.num_sms == 132
    assert mine.sources["device"] == "a guess (2026-11-26)"
    with pytest.raises(HardwareError, match=r"lack.* the block \[gemm\]"):
        replay_rates.load(written(f"[device]\n{block}"))
    with pytest.raises(HardwareError, match="not valid TOML"):
        replay_rates.load(written("[device"))
    with pytest.raises(HardwareError, match=r"`device.num_sms` must be of type int and not negative; got 1.5"):
        replay_rates.load(written(f'inherits = "h100-sxm"\n[device]\n{block}num_sms = 1.5\n'))
    with pytest.raises(HardwareError, match=r"`gemm.bf16.like` names no block"):
        replay_rates.load(written(f'inherits = "h100-sxm"\n[gemm]\n{block}[gemm.bf16]\nlike = "f17"\n'))
    with pytest.raises(HardwareError, match="inherit from each other"):
        replay_rates.load(written('inherits = "mine"\n'))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_block_of_a_profile_has_its_source(profile: str) -> None:
    rates = replay_rates.load(profile)
    assert rates.name == profile
    assert {"device", "gemm", "vector", "kernels", "link", "network", "host"} <= rates.sources.keys()


def test_the_planners_formulas_are_not_imported() -> None:
    modules = ("rates", "gemm_time", "collective_time", "kernel_time")
    program = (
        f"import sys; from autopar.xla_replay import {', '.join(modules)};"
        " print([name for name in sys.modules if name.startswith(('autopar.cost', 'autopar.xla_model', 'jax'))])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
