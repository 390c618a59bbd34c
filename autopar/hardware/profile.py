"""Load hardware profiles: the rates and sizes of a device and of the links between devices.

In: a name (`"h100-sxm"`) or the path of a TOML file in the format of `cost_models/README.md`.
Out: `HardwareProfile`, an argument of the whole cost model. This module does not import JAX and never inspects live
devices; `detect` maps JAX's name of a device to the name of its profile.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import HardwareError
from autopar.hardware.data_files import data_folder, names_in, suggestion
from autopar.hardware.xla_estimator import EstimatorProfile, read_estimator
from autopar.system.source_paths import PACKAGE

#: Dtypes whose matrix rate a profile must state; `float8` stands for every 8-bit float.
MATRIX_DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "float8")

#: Dtypes that run on the matrix units of another dtype.
_RUNS_AS = {"uint8": "int8", "int4": "int8", "uint4": "int8", "complex64": "float32", "complex128": "float64"}

#: Primitives for which a profile states operations per element, at its vector rate; `default` covers all others. The
#: values are those of a profile without `[operations]`: the counts of the sharding rules.
OPERATIONS = {
    "default": 1.0,
    "add": 1.0,
    "mul": 1.0,
    "div": 4.0,
    "exp": 10.0,
    "exp_bfloat16": 10.0,
    "exp2": 10.0,
    "expm1": 10.0,
    "log": 10.0,
    "log_bfloat16": 10.0,
    "log1p": 10.0,
    "logistic": 10.0,
    "pow": 10.0,
    "integer_pow": 1.0,
    "rsqrt": 4.0,
    "sqrt": 4.0,
    "cbrt": 4.0,
    "tanh": 10.0,
    "atan2": 10.0,
    "sin": 10.0,
    "cos": 10.0,
    "tan": 10.0,
    "erf": 10.0,
    "erfc": 10.0,
    "erf_inv": 10.0,
    "random_bits": 60.0,
}
#: Bytes of L1 cache per core in XLA's performance model (openxla/xla, gpu_performance_model_base.cc).
_NEAR_BYTES_OF_CORE = 2048
_COUNTS_AS = {"sub": "add", "add_any": "add", "threefry2x32": "random_bits"}

#: Links inside a host or an NVLink domain: a switch between all devices, links between some, the machine's bus, or its
#: memory for virtual devices.
LINK_KINDS = ("nvswitch", "nvlink", "pcie", "memory")

_HOW_TO_ADD = "or describe yours in a TOML file (cost_models/README.md) and pass its path"


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One kind of link between devices.

    Args:
        bytes_per_s: achieved rate of a device in one direction while a ring runs over the link, not the wire rate.
        latency_s: seconds per ring step without bytes.
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One kind of device with its links. Rates and sizes are per device.

    The devices form three levels: a host runs a process and has drives, an NVLink domain is one or more hosts whose
    devices share `host_link`, and `network_link` connects domains.

    Args:
        name: name for users, e.g. `h100-sxm`.
        description: one-line description.
        platform: JAX's platform, `cpu` or `gpu`.
        device_kinds: JAX's `device_kind` strings of this device.
        peak_flops_per_s: dense matrix rate per dtype of `MATRIX_DTYPES`; read it through `matrix_rate`, which accepts
            every dtype.
        vector_flops_per_s: rate outside the matrix units, float32.
        compute_efficiency: fraction of `peak_flops_per_s` that a large GEMM reaches.
        convolution_efficiency: fraction of a GEMM's rate that a convolution reaches.
        kernel_launch_s: fixed seconds per kernel.
        kernel_gap_s: seconds between two kernels of a stream.
        operations: operations per element, by name of `OPERATIONS`; read it through `flops_per_element`.
        hbm_bytes: size of device memory.
        usable_fraction: fraction of device memory that a program may fill.
        hbm_bytes_per_s: device memory bandwidth, reads and writes together.
        hbm_efficiency: fraction of it that a kernel reaches; read the product through `memory_bytes_per_s`.
        cache_bytes, near_cache_bytes: size of the device's cache and of its cores' caches together; 0 for none.
        host_link: link between devices of one NVLink domain, which is one host by default.
        network_link: link between devices of different domains.
        host_link_kind: one of `LINK_KINDS`.
        devices_per_host: number of devices of one host.
        storage_read_bytes_per_s, storage_write_bytes_per_s: rates of all drives of one host together.
        collective_launch_s: fixed seconds per collective.
        combine_threshold_bytes: XLA merges collectives of one kind up to this many bytes, and the merged collective
            pays `collective_launch_s` once.
        combined_launch_fraction: smallest fraction of launch and latency that a merged collective pays, because its
            buffer is still one more call.
        all_to_all_efficiency: fraction of a link's rate that an all-to-all reaches.
        kernel_slowdown: fraction of the kernels' rate that a concurrent collective takes.
        sources: source and date of each block of the file.
        nvlink_domain_devices: number of devices of one NVLink domain of several hosts; None if a domain is one host.
            Read it through `devices_per_domain`.
        usd_per_device_hour: rental price of a device; None if the file has none.
        replay_rates: name or path of the device's rates for the replay of a compiled program; None if they
            have the profile's name. Read it through `rates_name`.
        xla_target: XLA's target description, for compiling without such a GPU; None for a CPU.
        xla_estimator: constants of XLA's latency estimator for this GPU; None if XLA has none, as for a CPU or a GPU
            before Hopper.
    """

    name: str
    description: str
    platform: str
    device_kinds: tuple[str, ...]
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    vector_flops_per_s: float
    compute_efficiency: float
    kernel_launch_s: float
    operations: Mapping[str, float] = field(hash=False)
    hbm_bytes: int
    usable_fraction: float
    hbm_bytes_per_s: float
    cache_bytes: int
    near_cache_bytes: int
    host_link: LinkProfile
    network_link: LinkProfile
    host_link_kind: str
    devices_per_host: int
    storage_read_bytes_per_s: float
    storage_write_bytes_per_s: float
    collective_launch_s: float
    combine_threshold_bytes: int
    combined_launch_fraction: float
    all_to_all_efficiency: float
    sources: Mapping[str, str] = field(compare=False, repr=False)
    nvlink_domain_devices: int | None = None
    convolution_efficiency: float = 1.0
    kernel_gap_s: float = 0.0
    hbm_efficiency: float = 1.0
    kernel_slowdown: float = 0.0
    usd_per_device_hour: float | None = None
    replay_rates: str | None = None
    xla_target: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    xla_estimator: EstimatorProfile | None = field(default=None, repr=False)

    @property
    def usable_bytes(self) -> float:
        """Device memory that a program may fill, in bytes: the default memory budget."""
        return self.hbm_bytes * self.usable_fraction

    @property
    def memory_bytes_per_s(self) -> float:
        """Device memory bandwidth that a kernel reaches."""
        return self.hbm_bytes_per_s * self.hbm_efficiency

    @property
    def rates_name(self) -> str:
        """Name or path of the rates for the replay."""
        return self.replay_rates or self.name

    @property
    def devices_per_domain(self) -> int:
        """Number of devices that `host_link` connects: whole hosts.

        >>> load("h100-sxm").devices_per_domain
        8
        """
        host, domain = self.devices_per_host, self.nvlink_domain_devices or 0
        return max(host, domain - domain % host)

    def domain_in(self, num_devices: int) -> int:
        """Number of devices per NVLink domain for a mesh of `num_devices`.

        A mesh takes equally many whole hosts of each domain, and as many as possible: 128 GPUs on racks of 72 take 64 of
        each of two racks. If that is impossible, it fills one domain after the other.
        """
        host, domain = self.devices_per_host, self.devices_per_domain
        if num_devices <= domain:
            return domain
        return next((even for even in range(domain, host - 1, -host) if num_devices % even == 0), domain)

    def matrix_rate(self, dtype: str) -> float:
        """FLOP/s that a large GEMM of this dtype reaches.

        A dtype that no matrix unit supports runs at the vector rate.

        >>> h100 = load("h100-sxm")
        >>> h100.matrix_rate("bfloat16") == h100.compute_efficiency * h100.peak_flops_per_s["bfloat16"]
        True
        >>> h100.matrix_rate("int32") == h100.vector_flops_per_s
        True
        """
        family = _matrix_dtype(dtype)
        if family not in self.peak_flops_per_s:
            return self.vector_flops_per_s
        return self.peak_flops_per_s[family] * self.compute_efficiency

    def flops_per_element(self, primitive: str, dtype: str) -> float:
        """Operations per element of a primitive's result, at the vector rate.

        >>> h100 = load("h100-sxm")
        >>> h100.flops_per_element("sub", "float32"), h100.flops_per_element("exp", "bfloat16")
        (7.0, 3.0)
        """
        name = _COUNTS_AS.get(primitive, primitive)
        known = self.operations
        return known.get(f"{name}_{dtype}", known.get(name, known["default"]))

    def peak_rate(self, dtype: str) -> float:
        """Peak FLOP/s for this dtype, the denominator of MFU: of the matrix units, or of the vector units if the matrix
        units do not support it.

        >>> load("h100-sxm").peak_rate("bfloat16") == load("h100-sxm").peak_flops_per_s["bfloat16"]
        True
        """
        return self.peak_flops_per_s.get(_matrix_dtype(dtype), self.vector_flops_per_s)


def _matrix_dtype(dtype: str) -> str:
    """The dtype at whose rate the matrix units run this dtype.

    >>> _matrix_dtype("float8_e4m3fn"), _matrix_dtype("float64")
    ('float8', 'float64')
    """
    return "float8" if re.match(r"float[468](_|$)", dtype) else _RUNS_AS.get(dtype, dtype)


def load(name_or_path: str | Path) -> HardwareProfile:
    """Read a profile by name, or from a TOML file.

    Args:
        name_or_path: one of `known_names()`, or a path: a `Path`, or a string that ends in `.toml`.

    Raises:
        HardwareError: the name is unknown, the file is missing or no valid TOML, or a key is missing or invalid.

    >>> load("a100-sxm-80").devices_per_host
    8
    """
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and path.suffix != ".toml":
        path = _data_folder() / f"{name_or_path}.toml"
        if name_or_path not in known_names():
            raise HardwareError(_unknown(name_or_path))
    return _profile(_Reader(path, _parse(path)))


def known_names() -> tuple[str, ...]:
    """Names of the profiles that come with autopar, sorted."""
    return names_in(_data_folder())


def detect(device_kind: str, platform: str) -> str:
    """The name of the profile for a live device.

    Args:
        device_kind: `jax.Device.device_kind`, e.g. `"NVIDIA H100 80GB HBM3"`.
        platform: `jax.Device.platform`, `"cpu"` or `"gpu"` (`"cuda"` is taken as `"gpu"`).

    Raises:
        HardwareError: no profile names this kind of device.

    >>> detect("NVIDIA H200", "gpu")
    'h200'
    """
    wanted = (device_kind.lower(), "gpu" if platform == "cuda" else platform)
    for name in known_names():
        profile = load(name)
        if wanted in {(kind.lower(), profile.platform) for kind in profile.device_kinds}:
            return name
    raise HardwareError(
        f"no hardware profile for a {platform} device of kind {device_kind!r};"
        f" pass hardware= one of {', '.join(known_names())}, {_HOW_TO_ADD}"
    )


def _data_folder() -> Path:
    return data_folder("hardware", "hardware profiles", PACKAGE)


def _unknown(name: str) -> str:
    known = known_names()
    return f"unknown hardware {name!r}.{suggestion(name, known)} Known: {', '.join(known)}; {_HOW_TO_ADD}"


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"cannot read hardware profile {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"hardware profile {path} is not valid TOML: {error}") from error


def _profile(read: _Reader) -> HardwareProfile:
    blocks = ["compute", "memory", "links.host", "links.network", "storage", "collectives"]
    blocks += ["links.nvlink_domain"] if "nvlink_domain" in read.table.get("links", {}) else []
    operations, source = _operations(read)
    return HardwareProfile(
        name=read.text("name"),
        description=read.text("description"),
        platform=read.text("platform"),
        device_kinds=read.texts("device_kinds"),
        peak_flops_per_s={d: read.positive(f"compute.peak_flops_per_s.{d}") for d in MATRIX_DTYPES},
        vector_flops_per_s=read.positive("compute.vector_flops_per_s"),
        compute_efficiency=read.fraction("compute.compute_efficiency"),
        kernel_launch_s=read.not_negative("compute.kernel_launch_s"),
        operations=operations,
        hbm_bytes=read.count("memory.hbm_bytes"),
        usable_fraction=read.fraction("memory.usable_fraction"),
        hbm_bytes_per_s=read.positive("memory.hbm_bytes_per_s"),
        cache_bytes=_cache(read, "cache_bytes", "l2_cache_size", 1),
        near_cache_bytes=_cache(read, "near_cache_bytes", "core_count", _NEAR_BYTES_OF_CORE),
        host_link=read.link("links.host"),
        network_link=read.link("links.network"),
        host_link_kind=read.one_of("links.host.kind", LINK_KINDS),
        devices_per_host=read.count("links.host.devices_per_host"),
        storage_read_bytes_per_s=read.positive("storage.read_bytes_per_s"),
        storage_write_bytes_per_s=read.positive("storage.write_bytes_per_s"),
        collective_launch_s=read.not_negative("collectives.launch_s"),
        combine_threshold_bytes=read.count("collectives.combine_threshold_bytes"),
        combined_launch_fraction=read.fraction("collectives.combined_launch_fraction"),
        all_to_all_efficiency=read.fraction("collectives.all_to_all_efficiency"),
        sources={block: read.source(block) for block in blocks} | {"operations": source},
        nvlink_domain_devices=_nvlink_domain(read),
        convolution_efficiency=read.fraction("compute.convolution_efficiency", 1.0),
        kernel_gap_s=read.not_negative("compute.kernel_gap_s") if "kernel_gap_s" in read.table["compute"] else 0.0,
        hbm_efficiency=read.fraction("memory.hbm_efficiency", 1.0),
        kernel_slowdown=read.fraction("collectives.kernel_slowdown", 0.0),
        usd_per_device_hour=read.positive("price.usd_per_device_hour") if "price" in read.table else None,
        replay_rates=_replay_rates(read),
        xla_target=read.table.get("xla_target"),
        xla_estimator=_estimator(read),
    )


def _operations(read: _Reader) -> tuple[Mapping[str, float], str]:
    """The operations per element and their source."""
    if "operations" in read.table:
        return {name: read.positive(f"operations.{name}") for name in OPERATIONS}, read.source("operations")
    return OPERATIONS, "default counts of the rules: 1 per element, 4 for a division, 10 for a transcendental function"


def _nvlink_domain(read: _Reader) -> int | None:
    """The devices of an NVLink domain; None if the file has no such block."""
    if "nvlink_domain" not in read.table["links"]:
        return None
    domain, host = read.count("links.nvlink_domain.devices"), read.count("links.host.devices_per_host")
    if domain % host:
        raise HardwareError(
            f"hardware profile {read.path}: `links.nvlink_domain.devices` must be a multiple of"
            f" `links.host.devices_per_host`, {host}, because a domain holds whole hosts; got {domain}: give"
            f" {domain + host - domain % host}, or leave [links.nvlink_domain] out if NVLink ends at the host"
        )
    return domain


def _replay_rates(read: _Reader) -> str | None:
    """The name of the rates, or the path of their file, which the profile gives relative to its own folder."""
    if "replay_rates" not in read.table:
        return None
    given = read.text("replay_rates")
    return str((read.path.parent / given).absolute()) if given.endswith(".toml") else given


def _cache(read: _Reader, key: str, of_target: str, times: int) -> int:
    """Bytes of a cache: from the file, else from its `xla_target`, else 0."""
    if key in read.table.get("memory", {}):
        return read.count(f"memory.{key}")
    return times * read.count(f"xla_target.{of_target}") if "xla_target" in read.table else 0


def _estimator(read: _Reader) -> EstimatorProfile | None:
    if "xla_estimator" not in read.table:
        return None
    num_cores = read.count("xla_target.core_count")
    try:
        return read_estimator(read.table["xla_estimator"], num_cores)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise HardwareError(
            f"hardware profile {read.path}: `xla_estimator` cannot be read ({error}); cost_models/README.md lists its keys"
        ) from error


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads and checks values by dotted key; errors name the file and the key."""

    path: Path
    table: Mapping[str, Any]

    def value(self, key: str) -> Any:
        found: Any = self.table
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise HardwareError(
                    f"hardware profile {self.path} lacks `{key}`; cost_models/README.md lists every key and its unit"
                )
            found = found[part]
        return found

    def source(self, block: str) -> str:
        return f"{self.text(f'{block}.source')} ({self.text(f'{block}.date')})"

    def text(self, key: str) -> str:
        return self._must(key, "text", lambda v: isinstance(v, str) and bool(v))

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(
            self._must(key, "a list of texts", lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v))
        )

    def one_of(self, key: str, allowed: tuple[str, ...]) -> str:
        return self._must(key, f"one of {', '.join(allowed)}", lambda v: v in allowed)

    def positive(self, key: str) -> float:
        return float(self._must(key, "a number above 0", lambda v: _is_number(v) and v > 0))

    def not_negative(self, key: str) -> float:
        return float(self._must(key, "a number of at least 0", lambda v: _is_number(v) and v >= 0))

    def fraction(self, key: str, default: float | None = None) -> float:
        """A fraction of one.

        Args:
            default: for a key that the file may leave out.
        """
        block, _, name = key.rpartition(".")
        if default is not None and name not in self.value(block):
            return default
        return float(self._must(key, "a number above 0 and at most 1", lambda v: _is_number(v) and 0 < v <= 1))

    def count(self, key: str) -> int:
        return int(self._must(key, "a whole number of at least 1", lambda v: _is_number(v) and v == int(v) and v >= 1))

    def link(self, key: str) -> LinkProfile:
        return LinkProfile(self.positive(f"{key}.bytes_per_s"), self.not_negative(f"{key}.latency_s"))

    def _must(self, key: str, rule: str, holds: Callable[[Any], bool]) -> Any:
        value = self.value(key)
        if not holds(value):
            raise HardwareError(f"hardware profile {self.path}: `{key}` must be {rule}; got {value!r}")
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
