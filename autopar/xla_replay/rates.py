"""Load the rates of a device for the replay: tensor cores, memory, vector units, links, library kernels.

In: the name of a profile (`"h100-sxm"`) or the path of a TOML file in the format of `cost_models/replay/README.md`.
Out: `ReplayRates`, the constants that `gemm_time`, `collective_time` and `kernel_time` read. A file may inherit from
another one: its own keys win. This module imports no JAX and nothing of the planner's cost model.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import HardwareError
from autopar.hardware.data_files import data_folder, names_in, suggestion

_MOST_ANCESTORS = 4
_README = "cost_models/replay/README.md lists the keys"

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """One GPU outside its tensor cores.

    Args:
        num_sms: streaming multiprocessors.
        clock_hz: clock under load.
        hbm_bytes_per_s: datasheet bandwidth of device memory.
        hbm_efficiency: share of it that a large copy reaches.
        hbm_latency_s: time of one read that misses the L2 cache.
        l2_bytes: size of the L2 cache.
        l2_bytes_per_s: bandwidth of the L2 cache that kernels reach.
    """

    num_sms: int
    clock_hz: float
    hbm_bytes_per_s: float
    hbm_efficiency: float
    hbm_latency_s: float
    l2_bytes: float
    l2_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class GemmRates:
    """Tensor cores on operands of one dtype.

    Args:
        peak_flops_per_s: dense datasheet rate.
        efficiency: share of it in the inner loop of a full tile.
        sustained_share: most of it that a whole GEMM sustains: under load the power limit lowers the clock.
        launch_s: time of an empty kernel.
        fill_s: time to fill the pipeline of one tile.
        k_latency_s: least time of the inner loop for one element of the contracted dimension.
        load_bytes_per_clock: operand bytes that one SM loads from L2 in a clock.
        hbm_efficiency: share of the memory bandwidth that operands and result reach.
        store_cost: time that a tile's result adds, in units of its time at the SM's share of memory bandwidth.
        split_s: time that a split of the contracted dimension adds: partial sums are reduced at the end.
        alignment_cost: by the power of two bytes that each row of an operand or a result in memory is aligned to, if less
            than 16: how many times longer its loads and stores take.
        reorder_cost: time to transpose a right operand that is not k-major, in units of its bytes over the memory
            bandwidth; 0 where the tensor cores read both orders.
    """

    peak_flops_per_s: float
    efficiency: float
    sustained_share: float
    launch_s: float
    fill_s: float
    k_latency_s: float
    load_bytes_per_clock: float
    hbm_efficiency: float
    store_cost: float
    split_s: float
    alignment_cost: Mapping[int, float]
    reorder_cost: float


@dataclass(frozen=True, slots=True)
class VectorRates:
    """Arithmetic outside the tensor cores: results per clock and SM.

    Args:
        fp32: float32 add, multiply, fused multiply-add; also bfloat16, which XLA computes in float32.
        fp64: the same in float64.
        int32: integer add, shift, compare.
        special: reciprocal, square root, exponential, logarithm.
        convert: conversion between dtypes.
        issue_efficiency: share of these rates that compiled loops reach.
        atomics_per_s: atomic adds to distinct addresses in L2, of the device.
    """

    fp32: float
    fp64: float
    int32: float
    special: float
    convert: float
    issue_efficiency: float
    atomics_per_s: float


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Kernels of XLA's own code generator, and library kernels by their share of the peak.

    Args:
        launch_s: duration on the device of a kernel that reads one element.
        gap_s: time between two dependent kernels on one stream.
        transpose_efficiency, column_reduction_efficiency, gather_efficiency: share of a copy's bandwidth.
        scattered_rows_efficiency: the same of a Triton kernel whose tiles take one row from each of several places in
            memory.
        full_registers_efficiency: the same where the operands of a tile take half of the registers.
        convolution_efficiency: rate of cuDNN's implicit GEMM relative to a GEMM of the same shape.
        custom_efficiency: share of the tensor cores' peak that a Triton or Pallas kernel reaches.
        attention_forward, attention_backward: share of the peak in fused attention, by head dimension.
        attention_masked: the same under a causal mask, as a share of that, per needed FLOP.
        attention_forward_ramp, attention_backward_ramp: sequence length at which half of that share is reached.
    """

    launch_s: float
    gap_s: float
    transpose_efficiency: float
    column_reduction_efficiency: float
    gather_efficiency: float
    scattered_rows_efficiency: float
    full_registers_efficiency: float
    convolution_efficiency: float
    custom_efficiency: float
    attention_forward: Mapping[int, float]
    attention_backward: Mapping[int, float]
    attention_masked: float
    attention_forward_ramp: float
    attention_backward_ramp: float


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Links inside one NVLink domain, and how NCCL uses them.

    Args:
        bytes_per_s: wire rate of a device in one direction.
        efficiency: share of the wire that payload gets.
        launch_s: least time of a collective.
        skew_s: wait for the last device, for each doubling of the group.
        latency_scale: factor on NCCL's latency constants `start_s` and `step_s`.
        start_s: extra start time of the protocols LL, LL128, Simple.
        step_s: time of a step of the protocols LL, LL128, Simple.
        chunk_s: latency of one chunk in the pipeline of protocol Simple.
        copy_bytes_per_s: rate of the kernel that moves chunks of an all-gather.
        reduce_bytes_per_s: the same where chunks are also added.
        exchange_bytes_per_s: the same between all pairs.
        send_bytes_per_s: the same to a single peer.
        exchange_start_s: extra start time of an all-to-all: one connection for each peer.
        exchange_chunk_s: `chunk_s` of sends and receives.
        channel_bytes_per_s: rate of the channels that a message to one peer starts with.
        channel_share: what is left of it where a device also receives.
        channel_limit_bytes: message size above which NCCL doubles the channels.
        num_sms: multiprocessors that a running collective takes from concurrent kernels.
        nvls: whether the switch reduces and multicasts (NVLink SHARP).
        nvls_start_s: latency of that.
        nvls_efficiency: share of the wire that its payload gets.
    """

    bytes_per_s: float
    efficiency: float
    launch_s: float
    skew_s: float
    latency_scale: float
    start_s: tuple[float, float, float]
    step_s: tuple[float, float, float]
    chunk_s: float
    copy_bytes_per_s: float
    reduce_bytes_per_s: float
    exchange_bytes_per_s: float
    send_bytes_per_s: float
    exchange_start_s: float
    exchange_chunk_s: float
    channel_bytes_per_s: float
    channel_share: float
    channel_limit_bytes: float
    num_sms: int
    nvls: bool
    nvls_start_s: float
    nvls_efficiency: float


@dataclass(frozen=True, slots=True)
class NetworkRates:
    """The network between NVLink domains, per device.

    Args:
        bytes_per_s: wire rate of a device's share of the network cards, in one direction.
        efficiency: share of the wire that payload gets.
        step_s: time of a step between domains of the protocols LL, LL128, Simple.
        overhead_s: time of the host to post one message.
        tree_step_s: time of a step between domains in a tree over switches that reduce.
    """

    bytes_per_s: float
    efficiency: float
    step_s: tuple[float, float, float]
    overhead_s: float
    tree_step_s: float


@dataclass(frozen=True, slots=True)
class HostRates:
    """The link to host memory.

    Args:
        bytes_per_s: rate of a pinned copy in one direction.
        launch_s: time of an empty copy.
    """

    bytes_per_s: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class ReplayRates:
    """All constants of one device, read by `load`.

    Args:
        name: name of the profile.
        device, gemm, vector, kernels, link, network, host: constants by part; `gemm` by dtype of the operands.
        domain_size: devices of one NVLink domain.
        sources: for each block of the file, where its figures come from and when they were written down.
    """

    name: str
    device: DeviceRates
    gemm: Mapping[str, GemmRates]
    vector: VectorRates
    kernels: KernelRates
    link: LinkRates
    network: NetworkRates
    host: HostRates
    domain_size: int
    sources: Mapping[str, str]


def load(name: str | Path) -> ReplayRates:
    """The rates of a device.

    Args:
        name: name of a profile in `cost_models/replay`, or the path of a file that ends in `.toml`: rates, or a hardware
            profile whose `replay_rates` names them.

    Raises:
        HardwareError: the profile is unknown, cannot be read, or lacks a key.
    """
    path, tables = _file(name)
    if isinstance(of_profile := tables.get("replay_rates"), str):
        path, tables = _file(path.parent / of_profile if of_profile.endswith(".toml") else of_profile)
    return _rates(path, tables)


def known_names() -> tuple[str, ...]:
    """Names of the profiles that `load` finds."""
    return names_in(_folder())


def _file(name: str | Path) -> tuple[Path, dict[str, Any]]:
    """The path of a file by the name that `load` gets, and its tables with those that it inherits."""
    path = Path(name) if str(name).endswith(".toml") else _folder() / f"{name}.toml"
    if not path.is_file():
        known = known_names()
        raise HardwareError(
            f"no replay rates for {str(name)!r}.{suggestion(str(name), known)} Known: {', '.join(known)}; or pass the path"
            f" of a TOML file; {_README}"
        )
    return path, _inherited(path)


def _folder() -> Path:
    return data_folder("replay", "replay rates")


def _inherited(path: Path) -> dict[str, Any]:
    """The tables of a file over those of the files that it inherits from."""
    tables: dict[str, Any] = {}
    for _ in range(_MOST_ANCESTORS):
        try:
            own = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise HardwareError(f"cannot read replay rates {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise HardwareError(f"replay rates {path} are not valid TOML: {error}") from error
        tables = _over(tables, own)
        parent = own.get("inherits")
        if parent is None:
            return tables
        path = (
            path.parent / f"{parent}.toml"
            if (path.parent / f"{parent}.toml").is_file()
            else _folder() / f"{parent}.toml"
        )
    raise HardwareError(f"replay rates {path}: more than {_MOST_ANCESTORS} files inherit from each other")


def _over(above: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        merged[key] = _over(value, old) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def _rates(path: Path, tables: Mapping[str, Any]) -> ReplayRates:
    def part(kind: type[_Part], key: str, table: Mapping[str, Any] | None = None) -> _Part:
        table = _table(path, tables, key) if table is None else table
        fields = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        missing = [f"`{key}.{name}`" for name in fields if name not in table]
        if missing:
            raise HardwareError(f"replay rates {path} lack {', '.join(missing)}; {_README}")
        return kind(**{name: _value(path, f"{key}.{name}", str(of), table[name]) for name, of in fields.items()})

    gemm = _table(path, tables, "gemm")
    blocks = {dtype: _like(path, gemm, dtype) for dtype, block in gemm.items() if isinstance(block, dict)}
    return ReplayRates(
        name=str(tables.get("name", path.stem)),
        device=part(DeviceRates, "device"),
        gemm={dtype: part(GemmRates, f"gemm.{dtype}", block) for dtype, block in blocks.items()},
        vector=part(VectorRates, "vector"),
        kernels=part(KernelRates, "kernels"),
        link=part(LinkRates, "link"),
        network=part(NetworkRates, "network"),
        host=part(HostRates, "host"),
        domain_size=int(_value(path, "link.domain_size", "int", _table(path, tables, "link").get("domain_size", 0))),
        sources={key: f"{block['source']} ({block['date']})" for key, block in _sourced(path, tables)},
    )


def _table(path: Path, tables: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = tables.get(key)
    if not isinstance(table, dict):
        raise HardwareError(f"replay rates {path} lack the block [{key}]; {_README}")
    return table


def _like(path: Path, gemm: Mapping[str, Any], dtype: str) -> Mapping[str, Any]:
    """The constants of a dtype over those of the dtype that its key `like` names."""
    block = gemm[dtype]
    while "like" in block:
        like = block["like"]
        if not isinstance(gemm.get(like), dict) or like == dtype:
            raise HardwareError(f"replay rates {path}: `gemm.{dtype}.like` names no block of [gemm]: {like!r}")
        block = gemm[like] | {key: value for key, value in block.items() if key != "like"}
    return block


def _sourced(path: Path, tables: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    blocks = [(key, block) for key, block in tables.items() if isinstance(block, dict)]
    for key, block in blocks:
        if not {"source", "date"} <= block.keys():
            raise HardwareError(f"replay rates {path}: the block [{key}] lacks its `source` or `date`; {_README}")
    return blocks


def _value(path: Path, key: str, kind: str, value: Any) -> Any:
    """A value of a dataclass field, whose type is given as text."""
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and _is_number(value) and value == int(value) > 0:
        return int(value)
    if kind == "float" and _is_number(value):
        return float(value)
    if kind.startswith("tuple") and isinstance(value, list) and len(value) == 3 and all(map(_is_number, value)):
        return tuple(float(one) for one in value)
    if kind.startswith("Mapping") and isinstance(value, dict) and value and all(map(_is_number, value.values())):
        return {int(size): float(one) for size, one in value.items()}
    raise HardwareError(f"replay rates {path}: `{key}` must be of type {kind} and not negative; got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
