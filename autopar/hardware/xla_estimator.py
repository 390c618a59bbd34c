"""Define the constants of XLA's GPU latency estimator for one device, as part of a hardware profile.

In: the `[xla_estimator]` table of a profile. Out: `EstimatorProfile`. The constants are fitted to the log of XLA's
scheduler and to the tables of its CUDA plugin (`scripts/fit_xla_tables.py`). They describe XLA's estimates, which may
differ from the device's times. `xla_model.latency_estimator` has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFit:
    """Coefficients of the time of a large GEMM, a sum of terms.

    Args:
        launch_s: fixed seconds.
        s_per_flop: seconds per operation; a multiply-add is two.
        s_per_input_byte, s_per_output_byte: seconds per byte of the operands and of the result.
        s_per_wave: seconds per element of the contracted dim and wave of output tiles of 128 x 128 elements; a core
            computes one tile per wave.
    """

    launch_s: float
    s_per_flop: float
    s_per_input_byte: float
    s_per_output_byte: float
    s_per_wave: float


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """Coefficients of the time of one collective inside an NVLink domain: a sum of terms above 16 KiB, constants below.

    Args:
        launch_s: fixed seconds.
        s_per_root_byte: seconds per square root of bytes.
        s_per_byte: seconds per byte.
        small_s: seconds for 2 to 16 KiB.
        tiny_s: seconds for 1 KiB, which is slower in XLA's table.
    """

    launch_s: float
    s_per_root_byte: float
    s_per_byte: float
    small_s: float
    tiny_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallAllReduce:
    """The one-kernel all-reduce that XLA generates inside an NVLink domain.

    Args:
        bytes_per_s: rate over all links of a device.
        launch_s: seconds of the launch.
        barrier_s: seconds per barrier between devices.
        one_shot_bytes, max_bytes: largest product of buffer size and devices for one phase and for two.
    """

    bytes_per_s: float
    launch_s: float
    barrier_s: float
    one_shot_bytes: float
    max_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorNetwork:
    """The estimator's fixed network between NVLink domains.

    Args:
        bytes_per_s: rate of one device's link without headers.
        latency_s: seconds per message.
        chunk_s: seconds per started chunk of a message.
        chunk_bytes: size of a chunk.
        launch_s: seconds per collective.
        flat_s: seconds of a collective that the formula does not cover.
    """

    bytes_per_s: float
    latency_s: float
    chunk_s: float
    chunk_bytes: float
    launch_s: float
    flat_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorProfile:
    """XLA's latency estimator on one kind of device.

    Args:
        num_cores: number of streaming multiprocessors.
        memory_bytes_per_s: bandwidth of device memory.
        block_bytes_per_s: largest bandwidth of one thread block.
        cache_speedup, near_cache_speedup: factor on the bandwidth of repeated reads from the device's cache and from
            the cores' caches.
        scalar_flops_per_s: rate outside matrix units.
        parallel_fraction: hidden fraction of the shorter of arithmetic and memory time.
        unpriced_s: seconds of a kernel that the estimator does not model.
        custom_call_s: seconds of a library call other than a GEMM, whatever its size.
        issue_s: kernel time that the start and the end of a collective take.
        fitted_link_bytes_per_s, fitted_link_latency_s: the `host_link` of the devices of the collectives' fits.
        cycles: operations per element of a primitive; `default` for the others.
        gemms: fits by the common dtype of operands and result.
        collectives: fits by kind, then by number of devices.
        source: source and date of the numbers.
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
    fitted_link_bytes_per_s: float
    fitted_link_latency_s: float
    cycles: Mapping[str, float] = field(hash=False)
    gemms: Mapping[str, GemmFit] = field(hash=False)
    collectives: Mapping[str, Mapping[int, CollectiveFit]] = field(hash=False)
    small_all_reduce: SmallAllReduce
    network: EstimatorNetwork
    source: str = field(compare=False, repr=False)


def read_estimator(table: Mapping[str, Any], num_cores: int) -> EstimatorProfile:
    """The profile in a table of a hardware file.

    Raises:
        KeyError, TypeError: a key is missing or unknown.
    """
    plain = ("source", "date", "cycles", "gemms", "collectives", "small_all_reduce", "network")
    return EstimatorProfile(
        num_cores=num_cores,
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
