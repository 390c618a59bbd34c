"""What XLA's own GPU latency estimator charges on one device, as numbers of a hardware profile.

In: the `[xla_estimator]` table of a profile. Out: `EstimatorProfile`. They are fitted to what XLA's
scheduler logs and to the tables that its CUDA plugin carries (`scripts/fit_xla_tables.py`); they say
what XLA believes, which is not always what the device does. `kernels` has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFit:
    """Seconds of one large matrix product, as a sum of terms.

    Args:
        launch_s: always.
        s_per_flop: per operation; a multiply and an add are two.
        s_per_input_byte, s_per_output_byte: per byte of the operands and of the result.
        s_per_wave: per element of the contracted dim in each round of output tiles of 128 x 128 elements:
            a core takes one tile at a time.
    """

    launch_s: float
    s_per_flop: float
    s_per_input_byte: float
    s_per_output_byte: float
    s_per_wave: float


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """Seconds of one collective inside a host: a sum of terms, but for the smallest.

    Args:
        launch_s: always. s_per_root_byte: per square root of a byte. s_per_byte: per byte.
        small_s: of 2 to 16 KiB. tiny_s: of 1 KiB, which is dearer in XLA's table.
    """

    launch_s: float
    s_per_root_byte: float
    s_per_byte: float
    small_s: float
    tiny_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallAllReduce:
    """The one-kernel all-reduce that XLA writes itself inside a host.

    Args:
        bytes_per_s: over all links of a device. launch_s: once. barrier_s: each time all wait.
        one_shot_bytes, max_bytes: times the devices, the largest buffer for one step and for two.
    """

    bytes_per_s: float
    launch_s: float
    barrier_s: float
    one_shot_bytes: float
    max_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorNetwork:
    """The estimator's fixed network between hosts.

    Args:
        bytes_per_s: of one device's link, headers taken off.
        latency_s: per message. chunk_s: per `chunk_bytes` begun of a message. launch_s: per collective.
        flat_s: of a collective that the formula does not cover.
        always_flat: whether it covers none but permutes and small all-reduces, which then count as if inside
            a host: so it is where XLA is not told how many devices a host has (`partition_size`).
    """

    bytes_per_s: float
    latency_s: float
    chunk_s: float
    chunk_bytes: float
    launch_s: float
    flat_s: float
    always_flat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorProfile:
    """XLA's latency estimator on one kind of device.

    Args:
        num_cores: streaming multiprocessors.
        memory_bytes_per_s: device memory. block_bytes_per_s: what one thread block moves at most.
        cache_speedup, near_cache_speedup: how much faster it is read again: what fits the device's cache,
            and what fits those of the cores.
        scalar_flops_per_s: outside matrix units.
        parallel_fraction: the part of the shorter of arithmetic and memory time that the longer hides.
        unpriced_s: a kernel that the estimator knows nothing of. custom_call_s: a library call that is
            no matrix product, whatever its size.
        issue_s: what starting and ending a collective takes of the kernels' time.
        cycles: operations that one element of a primitive counts as; `default` for the others.
        gemms: by the dtype of operands and result alike.
        collectives: kind, then devices, to the fit.
        source: where the numbers come from, and when.
    """

    num_cores: int
    memory_bytes_per_s: float
    block_bytes_per_s: float
    cache_speedup: float
    near_cache_speedup: float
    scalar_flops_per_s: float
    parallel_fraction: float
    unpriced_s: float
    custom_call_s: float
    issue_s: float
    cycles: Mapping[str, float] = field(hash=False)
    gemms: Mapping[str, GemmFit] = field(hash=False)
    collectives: Mapping[str, Mapping[int, CollectiveFit]] = field(hash=False)
    small_all_reduce: SmallAllReduce
    network: EstimatorNetwork
    devices_per_host: int
    source: str = field(compare=False, repr=False)


def read_estimator(table: Mapping[str, Any], num_cores: int, devices_per_host: int) -> EstimatorProfile:
    """The profile in a table of a hardware file.

    Raises:
        KeyError, TypeError: a key is missing, or one too many.
    """
    plain = ("source", "date", "cycles", "gemms", "collectives", "small_all_reduce", "network")
    return EstimatorProfile(
        num_cores=num_cores,
        devices_per_host=devices_per_host,
        cycles=dict(table["cycles"]),
        gemms={dtype: GemmFit(**fit) for dtype, fit in table["gemms"].items()},
        collectives={
            kind: {int(devices): CollectiveFit(*fit) for devices, fit in fits.items()}
            for kind, fits in table["collectives"].items()
        },
        small_all_reduce=SmallAllReduce(**table["small_all_reduce"]),
        network=EstimatorNetwork(**table["network"]),
        source=f"{table['source']} ({table['date']})",
        **{key: value for key, value in table.items() if key not in plain},
    )
