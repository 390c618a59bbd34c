"""Predict the seconds of one GEMM from its tiles, waves, inner loop and traffic.

In: dimensions, HLO dtypes, `ReplayRates`. Out: seconds of the kernel on the device.

A GEMM kernel cuts the result into tiles, one for each thread block, and runs as many blocks at once as the GPU has
SMs; the last wave may be partly empty. A block loads slices of both operands from L2, multiplies them on the tensor
cores, and stores its tile. Where there are few tiles, several blocks share the contracted dimension of one tile
(split-K) and add their partial sums at the end. The library tries tile shapes and splits and keeps the best:

    time = launch + min over tiles, splits of max(waves x (inner loop + fill + store), operand and result bytes / memory)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.errors import HardwareError
from autopar.xla_replay.rates import DeviceRates, GemmRates, ReplayRates

#: Rows and columns of a block's tile of the result.
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
#: Blocks that share the contracted dimension of one tile.
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
_CANDIDATES = np.array([(rows, columns, split) for rows, columns in _TILES for split in _SPLITS], float).T
#: Rows aligned to as many bytes are copied without registers; of others, blocks have room for tiles of 128 x 128 at most.
_ALIGNED_BYTES = 16
_UNALIGNED_CANDIDATES = _CANDIDATES[:, _CANDIDATES[0] * _CANDIDATES[1] <= 128 * 128]
#: Elements of the contracted dimension in one slice.
_SLICE = 64
_PARTIAL_SUM_BYTES = 4

#: Bytes of an element, and the block of `ReplayRates.gemm` whose tensor cores it runs on.
_DTYPES = {
    "bf16": (2, "bf16"),
    "f16": (2, "f16"),
    "f32": (4, "f32"),
    "f64": (8, "f64"),
    "s8": (1, "s8"),
    "u8": (1, "s8"),
    "s4": (0.5, "s8"),
    "u4": (0.5, "s8"),
    "pred": (1, "s8"),
    "s16": (2, "f32"),
    "u16": (2, "f32"),
    "s32": (4, "f32"),
    "u32": (4, "f32"),
    "s64": (8, "f64"),
    "u64": (8, "f64"),
    "c64": (8, "f32"),
    "c128": (16, "f64"),
    "f8e4m3": (1, "f8"),
    "f8e4m3fn": (1, "f8"),
    "f8e4m3fnuz": (1, "f8"),
    "f8e4m3b11fnuz": (1, "f8"),
    "f8e5m2": (1, "f8"),
    "f8e5m2fnuz": (1, "f8"),
    "f8e3m4": (1, "f8"),
    "f8e8m0fnu": (1, "f8"),
    "f4e2m1fn": (0.5, "f4"),
}
#: Real multiplications in the product of two complex numbers.
_COMPLEX = {"c64": 4, "c128": 4}


def dtype_bytes(dtype: str) -> float:
    """Bytes of an element of an HLO dtype; half a byte for the 4-bit ones."""
    return _dtype(dtype)[0]


def peak_flops_per_s(rates: ReplayRates, dtype: str) -> float:
    """Dense datasheet rate of the tensor cores on operands of an HLO dtype."""
    return _rates_of(rates, dtype).peak_flops_per_s


def gemm_s(
    rates: ReplayRates,
    *,
    batch: int,
    m: int,
    n: int,
    k: int,
    lhs_dtype: str,
    rhs_dtype: str,
    out_dtype: str,
    unit_dtype: str = "",
    aligned_bytes: tuple[int, int, int] = (16, 16, 16),
    rhs_k_major: bool = True,
    lhs_bytes: float | None = None,
) -> float:
    """Seconds of `batch` products of an m x k and a k x n matrix.

    Args:
        lhs_dtype, rhs_dtype, out_dtype: HLO's names, such as `bf16` or `f8e4m3fn`. The slower operand decides the rate of
            the tensor cores; the result's dtype only decides the bytes that are written.
        unit_dtype: dtype that decides the rate instead of the operands'.
        aligned_bytes: alignment of the rows of the left operand, the right operand and the result in memory.
        rhs_k_major: whether the right operand is stored with k innermost. 8-bit tensor cores of Hopper read no other
            order; XLA then transposes it in an instruction of its own. False adds that transposition here.
        lhs_bytes: bytes of the left operand in memory, where they are not batch x m x k elements: a convolution reads
            each input several times.

    Raises:
        HardwareError: an unknown dtype, or one that the device has no rate for.
    """
    if min(batch, m, n) <= 0:
        return 0.0
    sides = [_rates_of(rates, dtype) for dtype in ([unit_dtype] if unit_dtype else (lhs_dtype, rhs_dtype))]
    slower = min(sides, key=lambda side: side.peak_flops_per_s)
    one = np.array([[batch], [m], [n], [k]], float)
    found = gemm_seconds(
        rates.device,
        slower,
        one[0],
        one[1],
        one[2],
        one[3],
        (dtype_bytes(lhs_dtype), dtype_bytes(rhs_dtype), dtype_bytes(out_dtype)),
        multiplications=_COMPLEX.get(lhs_dtype, 1),
        aligned_bytes=aligned_bytes,
        rhs_k_major=rhs_k_major,
        lhs_bytes=lhs_bytes,
    )
    return float(found[0])


def gemm_seconds(
    device: DeviceRates,
    gemm: GemmRates,
    batch: Any,
    m: Any,
    n: Any,
    k: Any,
    element_bytes: tuple[float, float, float],
    *,
    multiplications: int = 1,
    aligned_bytes: tuple[int, int, int] = (16, 16, 16),
    rhs_k_major: bool = True,
    lhs_bytes: float | None = None,
) -> Any:
    """Seconds of many GEMMs at once.

    Args:
        batch, m, n, k: arrays of shape (num_gemms,).
        element_bytes: bytes of an element of the left operand, the right operand, the result.
        multiplications: real multiplications for each pair of elements.

    Returns:
        Array of shape (num_gemms,).
    """
    lhs, rhs, out = element_bytes
    lhs_cost, rhs_cost, out_cost = (gemm.alignment_cost.get(one, 1.0) for one in aligned_bytes)
    batch, m, n, k = (dim[:, None] for dim in (batch, m, n, k))
    rows, columns, split = _CANDIDATES if min(aligned_bytes) >= _ALIGNED_BYTES else _UNALIGNED_CANDIDATES
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    waves = np.ceil(tiles * split / device.num_sms)
    sm_flops_per_s = gemm.peak_flops_per_s * gemm.efficiency / device.num_sms
    sm_memory_bytes_per_s = device.hbm_bytes_per_s / device.num_sms
    multiply = 2.0 * multiplications * rows * columns / sm_flops_per_s
    loaded = np.minimum(rows, m) * lhs * lhs_cost + np.minimum(columns, n) * rhs * rhs_cost
    load = loaded / (gemm.load_bytes_per_clock * device.clock_hz)
    inner = np.ceil(k / split / _SLICE) * _SLICE * np.maximum(np.maximum(multiply, load), gemm.k_latency_s)
    stored = np.minimum(rows, m) * np.minimum(columns, n) * np.where(split > 1, max(out, _PARTIAL_SUM_BYTES), out)
    store = gemm.store_cost * out_cost * stored / sm_memory_bytes_per_s
    partial_sums = (split + 1) * batch * m * n * _PARTIAL_SUM_BYTES / device.l2_bytes_per_s
    reduce = np.where(split > 1, gemm.split_s + partial_sums, 0.0)
    lhs_total = batch * m * k * lhs if lhs_bytes is None else lhs_bytes
    moved = lhs_total + batch * k * n * rhs + batch * m * n * out
    memory = moved / (device.hbm_bytes_per_s * gemm.hbm_efficiency)
    best = (np.maximum(waves * (inner + gemm.fill_s + store), memory) + reduce).min(1)
    sustained = 2.0 * multiplications * (batch * m * n * k)[:, 0] / (gemm.peak_flops_per_s * gemm.sustained_share)
    best = np.maximum(best, sustained)
    reorder = 0.0 if rhs_k_major else gemm.reorder_cost * (batch * k * n * rhs)[:, 0] / device.hbm_bytes_per_s
    return gemm.launch_s + best + reorder


def _rates_of(rates: ReplayRates, dtype: str) -> GemmRates:
    name = _dtype(dtype)[1]
    for one in (name, {"f4": "f8", "f8": "bf16", "f16": "bf16", "s8": "bf16"}.get(name, name)):
        if one in rates.gemm:
            return rates.gemm[one]
    raise HardwareError(
        f"the replay rates {rates.name!r} have no GEMM rate for {dtype}; known: {', '.join(rates.gemm)};"
        f" add a block [gemm.{name}]"
    )


def _dtype(dtype: str) -> tuple[float, str]:
    found = _DTYPES.get(dtype)
    if found is None:
        raise HardwareError(f"the replay knows no HLO dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    return found
