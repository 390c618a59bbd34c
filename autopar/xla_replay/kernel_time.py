"""Predict the seconds of XLA's fused kernels, of convolutions, and of library and custom kernels.

In: bytes, operation counts, parallelism, `ReplayRates`. Out: seconds of the kernel on the device.

A fused kernel takes its launch, the first read included, and the slower of memory and arithmetic. Both depend on
how far the kernel fills the GPU: memory bandwidth needs enough reads in flight (Little's law), arithmetic needs a block
on every SM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.xla_replay.gemm_time import dtype_bytes, gemm_s, peak_flops_per_s
from autopar.xla_replay.rates import ReplayRates

#: Bytes that one thread reads at once, and threads of a block in XLA's elementwise kernels.
_READ_BYTES, _BLOCK_THREADS = 16, 128
_MOST_THREADS_OF_SM = 2048
#: Elements of the result that one thread computes.
_UNROLL = 4
#: Integer operations that compute one element's address.
_ADDRESS_OPERATIONS = 3
#: Share of the L2 cache that still holds recent bytes.
_L2_SHARE = 0.5
#: Sectors of memory: the least that a scattered access moves.
_SECTOR_BYTES = 32
#: Most that a kernel without matrix units takes of the vector peak in cuDNN's depthwise convolutions.
_DEPTHWISE_EFFICIENCY = 0.3


@dataclass(frozen=True, slots=True)
class _Cost:
    """Instructions of one element: on the float or integer units, on the special-function units, conversions."""

    plain: float = 1.0
    special: float = 0.0
    convert: float = 0.0


_FREE = _Cost(0.0)
#: Instructions of an HLO opcode on one float32 element. Those of functions count the polynomials and range reductions of
#: CUDA's float32 library and of XLA's own expansions; special units compute 1/x, 1/sqrt(x), 2^x, log2(x).
_OPERATIONS = {
    **dict.fromkeys(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape"), _FREE),
    **dict.fromkeys(("broadcast", "copy", "slice", "transpose", "bitcast-convert", "opt-barrier"), _FREE),
    **dict.fromkeys(
        ("add", "subtract", "multiply", "maximum", "minimum", "compare", "select", "negate", "abs"), _Cost()
    ),
    **dict.fromkeys(("and", "or", "xor", "not", "shift-left", "shift-right-logical", "is-finite", "iota"), _Cost()),
    **dict.fromkeys(("shift-right-arithmetic", "reduce", "pad", "reverse", "concatenate", "real", "imag"), _Cost()),
    **dict.fromkeys(
        ("clamp", "complex", "popcnt", "sign", "dynamic-slice", "dynamic-update-slice", "gather"), _Cost(2)
    ),
    **dict.fromkeys(("floor", "ceil", "round-nearest-even", "round-nearest-afz", "clz"), _Cost(2)),
    "convert": _Cost(0, 0, 1),
    "reduce-precision": _Cost(3),
    "divide": _Cost(8, 1),
    "remainder": _Cost(16, 1),
    "sqrt": _Cost(5, 1),
    "rsqrt": _Cost(3, 1),
    "cbrt": _Cost(16, 2),
    "exponential": _Cost(5, 1),
    "exponential-minus-one": _Cost(14, 1),
    "log": _Cost(8, 1),
    "log-plus-one": _Cost(14, 1),
    "logistic": _Cost(9, 2),
    "tanh": _Cost(22, 1),
    "erf": _Cost(28, 1),
    "power": _Cost(36, 2),
    "sine": _Cost(26),
    "cosine": _Cost(26),
    "tan": _Cost(34, 1),
    "atan2": _Cost(30, 1),
    "rng-bit-generator": _Cost(60),
    "rng": _Cost(70, 1),
    "scatter": _Cost(4),
    "sort": _Cost(8),
    "map": _Cost(2),
}
_UNKNOWN = _Cost(8)


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What one fused kernel reads, writes and computes.

    Args:
        bytes_read: bytes read, each distinct one once.
        bytes_written: bytes of the results.
        operations: number of elements by HLO opcode and dtype, such as `{("add", "f32"): 1e6}`.
        num_reads: operands of which each thread reads at once.
        num_elements: elements that are computed in parallel: those of the largest result, or of the operand of a
            reduction.
        cached_bytes: part of `bytes_read` that is still in the L2 cache, see `cached_bytes`.
        transpose: whether it permutes dimensions, the innermost one included.
        column_reduction: whether it reduces a dimension other than the innermost one.
        gather: whether it reads rows by index.
        tile_efficiency: share of the memory rate that the tile of a Triton kernel allows.
        scatter_updates: elements that it adds or writes by index.
        passes: times that the bytes are read and written, for a sort.
    """

    bytes_read: float
    bytes_written: float
    operations: Mapping[tuple[str, str], float] = field(default_factory=dict)
    num_elements: float = 1.0
    num_reads: int = 1
    cached_bytes: float = 0.0
    transpose: bool = False
    column_reduction: bool = False
    gather: bool = False
    tile_efficiency: float = 1.0
    scatter_updates: float = 0.0
    passes: float = 1.0


def cached_bytes(rates: ReplayRates, num_bytes: float, touched_bytes: float) -> float:
    """Bytes of a buffer that the L2 cache still holds.

    Args:
        num_bytes: size of the buffer.
        touched_bytes: bytes that kernels have read and written since the buffer was written, itself included.
    """
    return (
        num_bytes
        * min(max(1.0 - (touched_bytes - num_bytes) / (_L2_SHARE * rates.device.l2_bytes), 0.0), 1.0)
        * (min(1.0, _L2_SHARE * rates.device.l2_bytes / max(num_bytes, 1.0)))
    )


def fusion_s(rates: ReplayRates, work: KernelWork) -> float:
    """Seconds of one kernel of XLA's code generator."""
    if work.num_elements <= 0 or work.bytes_read + work.bytes_written <= 0:
        return 0.0
    launch = rates.kernels.launch_s + (rates.device.hbm_latency_s if work.column_reduction else 0.0)
    return launch + max(_memory_s(rates, work), _arithmetic_s(rates, work), _scatter_s(rates, work))


def copy_s(rates: ReplayRates, num_bytes: float) -> float:
    """Seconds of a copy of `num_bytes` on the device."""
    return fusion_s(rates, KernelWork(num_bytes, num_bytes, num_elements=num_bytes / _UNROLL))


def host_transfer_s(rates: ReplayRates, num_bytes: float) -> float:
    """Seconds of a copy between device memory and pinned host memory."""
    return rates.host.launch_s + num_bytes / rates.host.bytes_per_s if num_bytes > 0 else 0.0


def convolution_s(
    rates: ReplayRates,
    *,
    output_positions: int,
    input_features: int,
    output_features: int,
    window_elements: int,
    dtype: str,
    out_dtype: str,
    groups: int = 1,
    direction: Literal["forward", "input_gradient", "filter_gradient"] = "forward",
    input_bytes: float | None = None,
) -> float:
    """Seconds of a convolution as cuDNN runs it: an implicit GEMM, or a direct kernel where groups are narrow.

    Args:
        output_positions: batch x spatial positions of the forward convolution's output; of its input for the gradient
            with respect to the input, where the stride is 1.
        input_features, output_features: features of the forward convolution, of all groups.
        window_elements: product of the window's sizes.
        groups: feature groups; as many as input features for a depthwise convolution.
        direction: which of the three convolutions of a training step.
        input_bytes: bytes of the activation operand; by default output_positions x features elements.
    """
    if min(output_positions, input_features, output_features, window_elements, groups) <= 0:
        return 0.0
    inputs, outputs = input_features / groups, output_features / groups
    m, n, k = {
        "forward": (output_positions, outputs, inputs * window_elements),
        "input_gradient": (output_positions, inputs, outputs * window_elements),
        "filter_gradient": (inputs * window_elements, outputs, output_positions),
    }[direction]
    read = input_features if direction != "input_gradient" else output_features
    activations = output_positions * read * dtype_bytes(dtype) if input_bytes is None else input_bytes
    kernel = gemm_s(
        rates,
        batch=groups,
        m=math.ceil(m),
        n=math.ceil(n),
        k=math.ceil(k),
        lhs_dtype=dtype,
        rhs_dtype=dtype,
        out_dtype=out_dtype,
        lhs_bytes=activations,
    )
    launch = rates.kernels.launch_s
    implicit = launch + max(kernel - launch, 0.0) / rates.kernels.convolution_efficiency
    if groups == 1:
        return implicit
    multiplies = output_positions * input_features * outputs * window_elements
    vector_per_s = rates.vector.fp32 * rates.device.num_sms * rates.device.clock_hz * _DEPTHWISE_EFFICIENCY
    written = output_positions * output_features * dtype_bytes(out_dtype)
    memory = (activations + written) / (rates.device.hbm_bytes_per_s * rates.device.hbm_efficiency)
    return min(implicit, launch + max(multiplies / vector_per_s, memory))


def attention_s(
    rates: ReplayRates,
    *,
    flops: float,
    num_bytes: float,
    head_dim: int,
    sequence: int,
    dtype: str = "bf16",
    backward: bool = False,
    masked: bool = False,
) -> float:
    """Seconds of fused attention, cuDNN's or a kernel of its class.

    Args:
        flops: operations that are needed: forward 4 x batch x heads x queries x keys x head_dim, half of it under a causal
            mask; backward 2.5 times as much.
        num_bytes: bytes of operands and results.
        head_dim: features of one head.
        sequence: keys that a query sees at most. Short sequences reach less of the peak.
        masked: whether a causal mask or a window leaves out scores: tiles on its edge are computed in full.
    """
    kernels = rates.kernels
    shares = kernels.attention_backward if backward else kernels.attention_forward
    ramp = kernels.attention_backward_ramp if backward else kernels.attention_forward_ramp
    share = _interpolated(shares, head_dim) * sequence / (sequence + ramp)
    share *= kernels.attention_masked if masked else 1.0
    return custom_call_s(rates, flops=flops, num_bytes=num_bytes, dtype=dtype, efficiency=share)


def custom_call_s(
    rates: ReplayRates, *, flops: float, num_bytes: float, dtype: str = "bf16", efficiency: float | None = None
) -> float:
    """Seconds of a kernel of which only operations and bytes are known, such as one in Triton or Pallas.

    Args:
        efficiency: share of the tensor cores' peak that it reaches; by default `custom_efficiency` of the rates.
    """
    if flops <= 0 and num_bytes <= 0:
        return 0.0
    share = rates.kernels.custom_efficiency if efficiency is None else efficiency
    compute = flops / (peak_flops_per_s(rates, dtype) * share) if flops > 0 else 0.0
    memory = num_bytes / (rates.device.hbm_bytes_per_s * rates.device.hbm_efficiency)
    return rates.kernels.launch_s + max(compute, memory)


def _memory_s(rates: ReplayRates, work: KernelWork) -> float:
    """Bytes over the bandwidth that enough reads in flight, the access pattern and the L2 cache allow."""
    device, kernels = rates.device, rates.kernels
    threads = min(math.ceil(work.num_elements / _UNROLL), device.num_sms * _MOST_THREADS_OF_SM)
    in_flight_bytes = max(threads, 32) * _READ_BYTES * max(1, work.num_reads)
    pattern = min(
        kernels.transpose_efficiency if work.transpose else 1.0,
        kernels.column_reduction_efficiency if work.column_reduction else 1.0,
        kernels.gather_efficiency if work.gather else 1.0,
        work.tile_efficiency,
    )
    hbm = min(device.hbm_bytes_per_s * device.hbm_efficiency, in_flight_bytes / device.hbm_latency_s) * pattern
    l2 = (
        min(device.l2_bytes_per_s, 2 * in_flight_bytes / device.hbm_latency_s) * pattern
    )  # an L2 hit takes half as long
    cached = min(work.cached_bytes, work.bytes_read)
    return work.passes * ((work.bytes_read - cached + work.bytes_written) / hbm + cached / l2)


def _arithmetic_s(rates: ReplayRates, work: KernelWork) -> float:
    """The slowest kind of unit, on the SMs that have a block."""
    vector = rates.vector
    blocks = math.ceil(work.num_elements / (_UNROLL * _BLOCK_THREADS))
    clocks_per_s = min(blocks, rates.device.num_sms) * rates.device.clock_hz * vector.issue_efficiency
    floats, doubles, special, convert = 0.0, 0.0, 0.0, 0.0
    integers = _ADDRESS_OPERATIONS * work.num_elements / _UNROLL
    for (opcode, dtype), count in work.operations.items():
        cost = _OPERATIONS.get(opcode, _UNKNOWN)
        times = {"c64": 4, "c128": 4}.get(dtype, 1)
        plain = count * cost.plain * times
        if dtype in ("f64", "c128"):
            doubles += plain + 8 * count * cost.special * times
        elif dtype.startswith(("s", "u", "pred")):
            integers += plain + 8 * count * cost.special
        else:
            floats += plain
            special += count * cost.special * times
        convert += count * cost.convert
    issued = floats / vector.fp32 + integers / vector.int32 + doubles / vector.fp64
    return max(issued, special / vector.special, convert / vector.convert) / clocks_per_s


def _scatter_s(rates: ReplayRates, work: KernelWork) -> float:
    """Updates by index: one atomic each, and a sector of memory read and written."""
    if work.scatter_updates <= 0:
        return 0.0
    sectors = 2 * _SECTOR_BYTES * work.scatter_updates / (rates.device.hbm_bytes_per_s * rates.device.hbm_efficiency)
    return max(work.scatter_updates / rates.vector.atomics_per_s, sectors)


def _interpolated(by_size: Mapping[int, float], size: int) -> float:
    """The value at a size, linear between the sizes given and constant outside of them."""
    sizes = sorted(by_size)
    if size <= sizes[0]:
        return by_size[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if size <= high:
            return by_size[low] + (by_size[high] - by_size[low]) * (size - low) / (high - low)
    return by_size[sizes[-1]]
