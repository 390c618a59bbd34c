"""Imitate XLA's GPU latency estimator, by which XLA orders a step's kernels and collectives.

In: an `Op`, the mesh, a hardware profile with an `xla_estimator`. Out: the seconds that XLA assumes. They decide the
order of the schedule; how long the step takes, the device's own rates say (`cost.kernel_time`).

The estimator, as found in its log and sources (openxla/xla, sol_latency_estimator.cc, matmul_interpolator.cc,
gpu_performance_model.cc, sol_gpu_cost_model.cc), with JAX 0.12.0.1:

- Loop and input fusions: `c + m - f min(c, m)`, where `c` is operations over the scalar rate, `m` is bytes read and
  written over the memory bandwidth plus bytes read again over a cache's bandwidth, and `f` is 0.95. Operations are
  XLA's cycles per element (`EstimatorProfile.cycles`). There is no launch. A kernel with few thread blocks reads and
  computes at their joint rate, so column reductions over few columns are slow.
- GEMMs, including whatever is fused into them: operations over a rate. XLA interpolates the rate in a table of
  measured GEMMs with dims of 256 to 4,096 (batch 1 to 4). It averages the 16 neighbours with weights
  1/(1 + distance squared) and clamps dims to the table, so far outside it time is proportional to operations. A fit
  replaces the table here. If operands and result differ in dtype, or the table lacks the dtype, XLA counts dims in
  bytes of the result, which multiplies bfloat16's time by the cube of the result's itemsize: by 64 for a float32
  result of bfloat16 operands, by 8 for float16.
- Library calls (cuDNN convolutions and attention): 10 us each, whatever they compute. Triton's kernels (an
  attention's softmax, forward and backward), copies, sorts, and whole loops: 0.01 us. Autopar predicts these from the
  device's own rates instead.
- Collectives in one NVLink domain: bytes over a rate, from another table by the nearest power of two of bytes. A fit replaces
  it too. An all-reduce of one buffer of at most 32 MiB / n is one kernel: its reads and writes, a launch, and
  `(n-1) B/w + barrier` up to 2 MiB / n, `2 ((n-1)/n B/w + barrier)` above.
- Collectives between domains: `r (d-1)/l (B/d/w + chunks + latency) + launch` plus memory time, for `d` devices of a
  communicator, `l` of them in one domain, and `r` rounds (2 for an all-reduce). An all-to-all sends B/(d-1) to each
  device of other domains in turn; a permute sends its buffer once. If XLA does not know the number of devices per
  domain (`partition_size`), each takes 5 ms.
- Each asynchronous collective takes 2 us of the kernels' time: 1 to start, 1 to end.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from operator import add, truediv

from autopar.cost.kernel_time import ITEMSIZE, fitted_gemm_seconds, op_seconds
from autopar.cost.user_collectives import registered
from autopar.hardware.profile import HardwareProfile
from autopar.hardware.xla_estimator import CollectiveFit, EstimatorProfile, GemmFit
from autopar.ir.device_program import Gemm, Op
from autopar.ir.mesh import MeshShape

#: Smallest and largest dims of the GEMMs in XLA's table.
_BATCH_RANGE, _DIM_RANGE = (1, 4), (256, 4096)
#: Bytes of the collectives in XLA's table.
_PAYLOAD_RANGE = (1 << 10, 1 << 30)
_SMALL_BYTES = 16 << 10
#: Rows that a column reduction adds in one kernel.
MOST_ROWS = 4096


def estimated_seconds(op: Op, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds of one operation by itself, as XLA estimates them; by the device's own rates where XLA has no estimate."""
    estimator = profile.xla_estimator
    if estimator is None or op.kind in ("view", "border", "loop") or op.collective in registered():
        return op_seconds(op, mesh, profile)
    if op.kind == "collective":
        return collective_seconds(op.collective, op.payload_bytes, op.axes, mesh, profile, num_buffers=len(op.writes))
    if op.unpriced:
        return estimator.unpriced_s
    if op.kind == "gemm":
        assert op.gemm is not None
        return gemm_seconds(op.gemm, estimator)
    if op.kind == "convolution":
        return estimator.custom_call_s
    return fusion_seconds(op, estimator)


def cycles(primitive: str, dtype: str, estimator: EstimatorProfile) -> float:
    """Operations that XLA counts for one element of a primitive.

    Args:
        primitive: name of the JAX primitive.
        dtype: dtype of the operand; the table has few separate entries for 16-bit floats.
    """
    short = dtype in ("bfloat16", "float16")
    table = estimator.cycles
    if short and f"{primitive}_short" in table:
        return table[f"{primitive}_short"]
    return table.get(primitive, table["default"])


def fusion_seconds(op: Op, estimator: EstimatorProfile) -> float:
    """Seconds of a loop or input fusion."""
    rate, scalar = estimator.memory_bytes_per_s, estimator.scalar_flops_per_s
    rates = (rate, rate * estimator.cache_speedup, rate * estimator.near_cache_speedup)
    if op.num_blocks:
        most = op.num_blocks * estimator.block_bytes_per_s
        rates = tuple(min(each, most) for each in rates)
        scalar *= min(1.0, op.num_blocks / estimator.num_cores)
    reads = map(add, (op.read_bytes + op.spared_bytes, op.reread_bytes, op.broadcast_bytes), op.recounted_bytes)
    memory = sum(map(truediv, reads, rates)) + (op.written_bytes + op.spared_bytes) / rate
    arithmetic = op.counted_flops / scalar
    return arithmetic + memory - estimator.parallel_fraction * min(arithmetic, memory)


def column_blocks(num_rows: float, num_columns: float, itemsize: float, num_outer: float = 1.0) -> float:
    """Number of thread blocks of a column reduction: few if there are few columns.

    XLA gives a block 32 columns times the number of elements in 8 bytes. It first splits more than 4,096 rows into
    parts, as many as the power of two below their square root; a second kernel adds the parts
    (tree_reduction_rewriter.cc).

    Args:
        num_rows: size of the reduced dims.
        num_columns: size of the kept contiguous dims inside the reduced ones.
        itemsize: bytes per element of the narrowest operand.
        num_outer: size of the kept dims outside the reduced ones.

    >>> column_blocks(2048, 1024, 4), column_blocks(2048, 1024, 2), column_blocks(8192, 768, 2)
    (16, 8, 384)
    """
    wide = 32 * min(4, int(8 // max(1, itemsize)))
    if num_rows > MOST_ROWS:
        num_outer *= 1 << math.isqrt(int(num_rows)).bit_length() - 1
    return max(1, int(num_outer) * math.ceil(num_columns / wide))


# -- GEMMs -----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def gemm_seconds(gemm: Gemm, estimator: EstimatorProfile) -> float:
    """Seconds of a GEMM, as XLA interpolates them."""
    same = gemm.dtype == gemm.out_dtype
    if gemm.dtype.startswith("float8") and gemm.out_dtype == "bfloat16" and "float8" in estimator.gemms:
        family, size = "float8", 1
    elif same and gemm.dtype in estimator.gemms:
        family, size = gemm.dtype, 1
    else:
        family, size = "bfloat16", ITEMSIZE.get(gemm.out_dtype, 2)
    sizes = (gemm.batch, gemm.m * size, gemm.n * size, gemm.k * size)
    operations = 2.0 * math.prod(sizes)
    scale = 1 if size == 1 else 2  # the fallback table counts dims in bytes of bfloat16
    return operations / _interpolated_rate(sizes, scale, family, estimator)


def _interpolated_rate(sizes: tuple[int, ...], scale: int, family: str, estimator: EstimatorProfile) -> float:
    ranges = (_BATCH_RANGE, *(((low * scale, high * scale) for low, high in [_DIM_RANGE] * 3)))
    ends = [
        (_clamped(_power_below(size), bounds), _clamped(_power_above(size), bounds))
        for size, bounds in zip(sizes, ranges, strict=True)
    ]
    total = weights = 0.0
    for corner in itertools.product(*ends):
        weight = 1.0 / (1.0 + sum((a - b) ** 2 for a, b in zip(corner, sizes, strict=True)))
        batch, m, n, k = corner[0], *(dim // scale for dim in corner[1:])
        total += weight * _table_rate(batch, m, n, k, estimator.gemms[family], family, estimator.num_cores)
        weights += weight
    return total / weights


@lru_cache(maxsize=4096)
def _table_rate(batch: int, m: int, n: int, k: int, fit: GemmFit, family: str, num_cores: int) -> float:
    """Operations per second of a GEMM in XLA's table."""
    size, out_size = (1, 2) if family == "float8" else (ITEMSIZE[family], ITEMSIZE[family])
    seconds = fitted_gemm_seconds(batch, m, n, k, (size, out_size), fit, num_cores)
    return 2.0 * batch * m * n * k / seconds


def _power_above(size: int) -> int:
    return 1 << max(0, (size - 1).bit_length())


def _power_below(size: int) -> int:
    return _power_above((size >> 1) + 1)


def _clamped(size: int, bounds: tuple[int, int]) -> int:
    return min(max(size, bounds[0]), bounds[1])


# -- collectives -----------------------------------------------------------------------------


def collective_seconds(
    kind: str,
    num_bytes: float,
    axes: tuple[str, ...],
    mesh: MeshShape,
    profile: HardwareProfile,
    *,
    num_buffers: int = 1,
) -> float:
    """Seconds of a collective without overlap, by XLA's estimator.

    Args:
        num_bytes: payload per device by the convention of `collectives`, of all merged buffers together.
        profile: hardware profile with an `xla_estimator`.
        num_buffers: number of merged buffers.
    """
    estimator, devices = profile.xla_estimator, mesh.sizes(axes)
    assert estimator is not None
    if devices == 1 or num_bytes <= 0:
        return 0.0
    domain, small = profile.domain_in(mesh.num_devices), estimator.small_all_reduce
    if _crosses_domains(axes, mesh, domain):
        return _between_domains(kind, num_bytes, devices, mesh.num_devices // devices, domain, estimator)
    if _is_small(kind, num_bytes, devices, num_buffers, estimator):
        traffic = 2 * num_bytes / estimator.memory_bytes_per_s
        if num_bytes * devices <= small.one_shot_bytes:
            return traffic + small.launch_s + (devices - 1) * num_bytes / small.bytes_per_s + small.barrier_s
        phase = (devices - 1) / devices * num_bytes / small.bytes_per_s + small.barrier_s
        return traffic + small.launch_s + 2 * phase
    fits = estimator.collectives[kind]
    fit = fits[min(fits, key=lambda measured: abs(math.log(measured / devices)))]
    nearest = min(max(_nearest_power(num_bytes), _PAYLOAD_RANGE[0]), _PAYLOAD_RANGE[1])
    return num_bytes / nearest * _measured_collective(fit, nearest)


def _measured_collective(fit: CollectiveFit, num_bytes: int) -> float:
    """Seconds of a collective in XLA's table."""
    if num_bytes <= _PAYLOAD_RANGE[0]:
        return fit.tiny_s
    if num_bytes <= _SMALL_BYTES:
        return fit.small_s
    return fit.launch_s + fit.s_per_root_byte * math.sqrt(num_bytes) + fit.s_per_byte * num_bytes


def is_small(op: Op, mesh: MeshShape, profile: HardwareProfile) -> bool:
    """Whether XLA generates its own kernel for this collective: a small, unmerged all-reduce within an NVLink domain."""
    if profile.xla_estimator is None or _crosses_domains(op.axes, mesh, profile.domain_in(mesh.num_devices)):
        return False
    return _is_small(op.collective, op.payload_bytes, mesh.sizes(op.axes), len(op.writes), profile.xla_estimator)


def _is_small(kind: str, num_bytes: float, devices: int, num_buffers: int, estimator: EstimatorProfile) -> bool:
    return kind == "all-reduce" and num_buffers == 1 and num_bytes * devices <= estimator.small_all_reduce.max_bytes


def _between_domains(
    kind: str, num_bytes: float, devices: int, num_groups: int, domain: int, estimator: EstimatorProfile
) -> float:
    """XLA's estimate of a ring over domains, with its own count of the participants."""
    network = estimator.network
    copies = {"all-reduce": 2.0, "all-to-all": 2.0, "collective-permute": 2.0}.get(kind, 3.0 - 1.0 / devices)
    memory = copies * num_bytes / estimator.memory_bytes_per_s
    if kind == "collective-permute":
        return memory + network.launch_s + _message(num_bytes, estimator)
    if domain % num_groups:
        return network.flat_s
    # XLA counts domains for one group; for several groups it counts each device as a domain.
    domains = max(1, devices // domain) if num_groups == 1 else devices
    members = domains * domain // num_groups
    local = members // domains
    if kind == "all-to-all":
        peers = local * (domains - 1)
        return memory + network.launch_s + peers * _message(num_bytes // (members - 1), estimator)
    rounds = 2 if kind == "all-reduce" else 1
    steps = rounds * (members - 1) / local
    return memory + network.launch_s + steps * _message(num_bytes // members, estimator)


def _message(num_bytes: float, estimator: EstimatorProfile) -> float:
    network = estimator.network
    chunks = math.ceil(num_bytes / network.chunk_bytes)
    return num_bytes / network.bytes_per_s + chunks * network.chunk_s + network.latency_s


def _crosses_domains(axes: tuple[str, ...], mesh: MeshShape, domain: int) -> bool:
    if mesh.num_devices <= domain:
        return False
    spans = [mesh.size(axis) * mesh.stride(axis) for axis in axes if mesh.size(axis) > 1]
    return any(span > domain or domain % span for span in spans)


def _nearest_power(num_bytes: float) -> int:
    below = 1 << int(math.log2(num_bytes)) if num_bytes >= 1 else 1
    return below if num_bytes - below < 2 * below - num_bytes else 2 * below
