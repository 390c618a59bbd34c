"""Predict the time of one kernel or one collective of a device's program, by the device's own rates.

In: an `Op`, the mesh, a hardware profile. Out: seconds.

- A kernel takes a launch, and the longest of the times of matrix units, vector units and memory.
- A GEMM takes what a fit to measured GEMMs says, where the profile has one; no less than its operations at the
  sustained rate, and its bytes at the memory rate.
- A column reduction of few columns has few thread blocks, which do not reach the memory rate; one of many rows is two
  kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cost.collectives import collective_time
from autopar.hardware.profile import HardwareProfile
from autopar.hardware.xla_estimator import GemmFit
from autopar.ir.device_program import Gemm, Op
from autopar.ir.mesh import MeshShape

#: Bytes of an element of a GEMM's operands and results.
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int8": 1, "uint8": 1}
#: The limit of a kernel whose rows are not aligned, beside that of the same kernel if they were.
UNALIGNED = "unaligned rows"
#: Bytes that a thread loads at once from a row that is aligned to as many.
ALIGNED_BYTES = 16
#: How many times longer loads of rows take that are aligned to fewer bytes. 2 and 4: measured on an H100
#: (benchmarks/results/kernels.md); 8: an assumption between 4 and 16; 1: as 2.
_UNALIGNED_LOADS = {1: 5.7, 2: 5.7, 4: 3.4, 8: 1.8}
#: Loads of both operands of an aligned tile, in units of the time of its products; by the same measurements.
_LOADS_OF_PRODUCTS = 0.84
#: Rows and columns of a tile of operands that are not aligned, and the slices of the contracted dim that it loads.
_UNALIGNED_TILE, _SLICE = 128, 64
#: The same for the bytes of a result, in units of their time at the memory rate, less the aligned one.
_UNALIGNED_STORES = 0.75
#: The share of the memory rate that kernels reach with scattered rows, and with few threads for lack of registers, by the
#: same measurements.
_SCATTERED_ROWS, _FULL_REGISTERS = 0.84, 0.62
#: Elements of the result in one core's output tile.
_TILE = 128 * 128
#: Most cores that share a tile.
_MOST_SPLITS = 16
#: Elements of the shorter side of the smallest tile.
_TILE_SIDE = 64
#: Dtypes with a fit of their own; those of equal size share one.
_FITTED = {1: "float8", 2: "bfloat16", 4: "float32"}


def op_seconds(op: Op, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds of one operation by itself, a collective without overlap."""
    if op.kind in ("view", "border", "loop"):
        return 0.0
    if op.kind == "collective":
        return collective_time(op.collective, op.payload_bytes, op.axes, mesh, profile)
    return _busiest(op, profile)[1] + _launch_seconds(op, profile)


def bounds(op: Op, profile: HardwareProfile) -> tuple[tuple[str, float], ...]:
    """The limits of a kernel, with seconds each: its busiest unit, its launches, and what rows that are not aligned add."""
    unit, seconds = _busiest(op, profile)
    launches = "kernel launches", _launch_seconds(op, profile)
    if op.gemm is None or min(op.gemm.aligned_bytes) >= ALIGNED_BYTES:
        return (unit, seconds), launches
    aligned = replace(op, gemm=replace(op.gemm, aligned_bytes=(ALIGNED_BYTES,) * 3))
    unit, usual = _busiest(aligned, profile)
    return (unit, usual), (UNALIGNED, seconds - usual), launches


def _launch_seconds(op: Op, profile: HardwareProfile) -> float:
    return op.num_launches * (profile.kernel_launch_s + profile.kernel_gap_s)


def _busiest(op: Op, profile: HardwareProfile) -> tuple[str, float]:
    return max(_by_unit(op, profile).items(), key=lambda one: one[1])


def _by_unit(op: Op, profile: HardwareProfile) -> dict[str, float]:
    memory, vector = profile.memory_bytes_per_s, profile.vector_flops_per_s
    reading = memory
    if op.num_blocks and profile.xla_estimator is not None:
        estimator = profile.xla_estimator
        reading = min(memory, op.num_blocks * estimator.block_bytes_per_s)
        vector *= min(1.0, op.num_blocks / estimator.num_cores)
    traffic = max(op.read_bytes / reading + op.written_bytes / memory, op.indexed_bytes / memory)
    traffic /= (_SCATTERED_ROWS if op.scattered_rows else 1.0) * (_FULL_REGISTERS if op.fills_registers else 1.0)
    if op.gemm is not None and op.kind == "gemm":
        return {"matrix units": gemm_seconds(op.gemm, profile), "memory bandwidth": traffic}
    matrix_s = sum(flops / profile.matrix_rate(dtype) for dtype, flops in op.matrix_flops) / op.matrix_efficiency
    if op.kind == "convolution":
        if op.gemm is not None:
            matrix_s = max(matrix_s, gemm_seconds(op.gemm, profile))
        matrix_s /= profile.convolution_efficiency
    return {
        "matrix units": matrix_s,
        "vector units": op.flops / vector,
        "memory bandwidth": traffic,
    }


def gemm_seconds(gemm: Gemm, profile: HardwareProfile) -> float:
    """Seconds of a GEMM without `kernel_launch_s`. A core computes whole tiles of each result."""
    m, n = (math.ceil(size / _TILE_SIDE) * _TILE_SIDE for size in (gemm.m, gemm.n))
    sustained = 2.0 * gemm.batch * m * n * gemm.k / profile.matrix_rate(gemm.dtype)
    size, out_size = ITEMSIZE.get(gemm.dtype, 1), ITEMSIZE.get(gemm.out_dtype, 2)
    unaligned = 0.0
    if profile.platform == "gpu" and min(gemm.aligned_bytes) < ALIGNED_BYTES:
        loads, unaligned = _unaligned_seconds(gemm, out_size, profile)
        sustained = max(sustained, loads)
    estimator = profile.xla_estimator
    fit = estimator.gemms.get(_FITTED.get(size, "")) if estimator else None
    if estimator is None or fit is None:
        return sustained + unaligned
    tiles = max(1, math.ceil(gemm.batch * m * n / _TILE))
    fitted = fitted_gemm_seconds(
        gemm.batch,
        m,
        n,
        gemm.k,
        (size, out_size),
        fit,
        estimator.num_cores,
        num_splits=min(_MOST_SPLITS, max(1, estimator.num_cores // tiles)),
    )
    return max(sustained, fitted - profile.kernel_launch_s) + unaligned


def _unaligned_seconds(gemm: Gemm, out_size: int, profile: HardwareProfile) -> tuple[float, float]:
    """Seconds to load the tiles of both operands, and seconds more to store the result's, where rows are not aligned."""
    left, right, out = (_UNALIGNED_LOADS.get(one, 1.0) for one in gemm.aligned_bytes)
    tiles = gemm.batch * math.ceil(gemm.m / _UNALIGNED_TILE) * math.ceil(gemm.n / _UNALIGNED_TILE)
    rows, columns = (min(size, _UNALIGNED_TILE) for size in (gemm.m, gemm.n))
    products = 2.0 * tiles * _UNALIGNED_TILE**2 * math.ceil(gemm.k / _SLICE) * _SLICE / profile.matrix_rate(gemm.dtype)
    loads = _LOADS_OF_PRODUCTS * products * (left * rows + right * columns) / (2 * _UNALIGNED_TILE)
    stored = tiles * rows * columns * out_size / profile.memory_bytes_per_s
    return loads, _UNALIGNED_STORES * (out - 1.0) * stored


def fitted_gemm_seconds(
    batch: int, m: int, n: int, k: int, itemsizes: tuple[int, int], fit: GemmFit, num_cores: int, *, num_splits: int = 1
) -> float:
    """Seconds of a GEMM by a fit to measured ones, its launch included.

    Args:
        itemsizes: bytes per element of the operands and of the result.
        num_splits: cores that share the contracted dim of one output tile, where there are few tiles (split-K).
    """
    size, out_size = itemsizes
    return (
        fit.launch_s
        + fit.s_per_flop * 2.0 * batch * m * n * k
        + fit.s_per_input_byte * batch * (m * k + k * n) * size
        + fit.s_per_output_byte * batch * m * n * out_size
        + fit.s_per_wave * k * math.ceil(batch * m * n / _TILE / num_cores) / num_splits
    )
