"""Represent a calibration: fit its samples, build the hardware profile, and write both to files.

In: samples, a base profile for figures that were not measured, the machine. Out: a profile as described in
`cost_models/README.md`, and JSON with all samples, coefficients and errors. No JAX.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.calibration.fit import Fit, Sample, fit
from autopar.cost.collectives import KINDS
from autopar.errors import HardwareError
from autopar.hardware.profile import MATRIX_DTYPES, OPERATIONS, HardwareProfile

#: Collectives that the profile prices by the link's full bandwidth; an all-to-all has an efficiency of its own.
_ON_THE_LINK = tuple(kind for kind in KINDS if kind != "all-to-all")
_LINK = "link"
_CONVOLUTIONS = ("convolution", "convolution gradient")
_ATTENTION = ("xla", "xla with gradients", "cudnn", "cudnn with gradients")
_COPIES = ("host-to-device", "device-to-host", "device-to-pinned-host", "pinned-host-to-device")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where, when and how the samples were measured."""

    device_kind: str
    platform: str
    num_devices: int
    host: str
    versions: Mapping[str, str] = field(hash=False)
    date: str
    command: str

    def describe(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        count = f"{self.num_devices} {self.platform} device{'s' if self.num_devices > 1 else ''}"
        return f"measured by `{self.command}` on {count} ({self.device_kind}; {self.host}) at once, with {versions}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """The samples of a machine and their fits.

    Args:
        base: profile with the figures that cannot be measured.
        skipped: benchmarks without a sample: group, name and reason.
    """

    machine: Machine
    base: HardwareProfile
    samples: tuple[Sample, ...]
    fits: tuple[Fit, ...]
    skipped: tuple[Mapping[str, str], ...] = ()

    def fit_of(self, group: str) -> Fit | None:
        return next((found for found in self.fits if found.group == group), None)

    def rate(self, group: str, term: str) -> float | None:
        """Counts per second of a term; None where its coefficient is zero or there is no fit."""
        found = self.fit_of(group)
        return 1 / found.seconds_per[term] if found and found.seconds_per[term] > 0 else None

    def matmul_rate(self, dtype: str) -> float | None:
        """FLOP/s of matmuls: the fitted rate, and no more than the fastest one reaches, since large ones are slower than the
        fit to all sizes extrapolates: under load a power limit lowers the clock."""
        group = f"matmul {dtype}"
        fitted = self.rate(group, "flops")
        reached = (one.counts["flops"] / one.seconds for one in self.samples if one.group == group)
        return None if fitted is None else min(fitted, max(reached, default=fitted))

    def vector_rate(self) -> float | None:
        """FLOP/s outside matrix units, in the sharding rules' counts; None on a GPU, whose rate is that of instructions."""
        return None if self.base.platform == "gpu" else self.rate("memory", "flops")


def fit_all(samples: Sequence[Sample]) -> tuple[Fit, ...]:
    """Fit each group of samples, and the link that most collectives share, where there are enough samples."""
    terms = {
        "kernel launch": ("program", "kernels"),
        "memory": ("bytes", "flops"),  # the launch overhead of large arrays is below the noise
        "cache": ("launch", "bytes", "flops"),
        **{f"matmul {dtype}": ("launch", "flops", "bytes") for dtype in MATRIX_DTYPES},
        **dict.fromkeys(KINDS, ("launch", "hops", "bytes")),
        "collective-permute": ("launch", "bytes"),  # it always has one hop, so hop and launch are not separable
        "matmul bfloat16 to float32": ("launch", "flops", "bytes"),
        "reduction": ("launch", "bytes", "flops"),
        **{f"{kind} {dtype}": ("launch", "flops", "bytes") for kind in _CONVOLUTIONS for dtype in MATRIX_DTYPES},
        **{f"attention {kind}": ("launch", "flops", "bytes") for kind in _ATTENTION},
        **dict.fromkeys(_COPIES, ("launch", "bytes")),
    }
    groups = {group: [s for s in samples if s.group == group] for group in terms}
    groups[_LINK] = [s for s in samples if s.group in _ON_THE_LINK]
    terms[_LINK] = ("launch", "hops", "bytes")
    found = (fit(group, members, terms[group]) for group, members in groups.items() if members)
    return tuple(each for each in found if each is not None)


# -- the profile ---------------------------------------------------------------------------------


def profile_table(calibration: Calibration, name: str) -> dict[str, Any]:
    """The profile as nested TOML tables. Figures that were not measured come from the base; `source` names them."""
    base, machine = calibration.base, calibration.machine
    table: dict[str, Any] = {
        "name": name,
        "description": f"{machine.num_devices} x {machine.device_kind}, measured by `autopar calibrate`",
        "platform": base.platform,
        "device_kinds": [machine.device_kind],
        **({"replay_rates": base.rates_name} if base.platform == "gpu" else {}),
        "compute": _compute(calibration),
        "operations": _operations(calibration),
        "memory": _memory(calibration),
        "links": _links(calibration),
        "storage": _storage(calibration),
        "collectives": _collectives(calibration),
    }
    if base.xla_target is not None:
        table["xla_target"] = dict(base.xla_target)
    return table


def _compute(calibration: Calibration) -> dict[str, Any]:
    base = calibration.base
    rates = {dtype: calibration.matmul_rate(dtype) for dtype in MATRIX_DTYPES}
    launch = calibration.fit_of("kernel launch")
    block = _Block(calibration, "compute")
    block.add("vector_flops_per_s", calibration.vector_rate(), base.vector_flops_per_s)
    # The fitted rates are those that matmuls achieve, so the efficiency is 1.
    block.table["compute_efficiency"] = 1.0
    block.add("kernel_launch_s", launch and launch.seconds_per["kernels"], base.kernel_launch_s + base.kernel_gap_s)
    block.add("convolution_efficiency", None, base.convolution_efficiency)
    block.table["peak_flops_per_s"] = {
        dtype: block.chosen(f"peak_flops_per_s.{dtype}", rate, base.matrix_rate(dtype)) for dtype, rate in rates.items()
    }
    groups = ["kernel launch", "memory", *(f"matmul {dtype}" for dtype in MATRIX_DTYPES)]
    return block.done(groups)


def _operations(calibration: Calibration) -> dict[str, Any]:
    """The base's FLOPs per element, scaled so that tanh counts as in the fit of the vector rate."""
    base, block = calibration.base, _Block(calibration, "operations")
    scale = OPERATIONS["tanh"] / base.operations["tanh"] if calibration.vector_rate() is not None else 1.0
    for name, count in base.operations.items():
        block.add(name, None, float(f"{count * scale:.4g}"))
    table = block.done([])
    if scale != 1.0:
        table["source"] += f"; all times {scale:.4g}, so that a tanh counts {OPERATIONS['tanh']:g} as in the fit"
    return table


def _memory(calibration: Calibration) -> dict[str, Any]:
    base, block = calibration.base, _Block(calibration, "memory")
    block.add("hbm_bytes", None, base.hbm_bytes)
    block.add("usable_fraction", None, base.usable_fraction)
    block.add("hbm_bytes_per_s", calibration.rate("memory", "bytes"), base.memory_bytes_per_s)
    block.add("cache_bytes", None, base.cache_bytes)
    block.add("near_cache_bytes", None, base.near_cache_bytes)
    return block.done(["memory"])


def _links(calibration: Calibration) -> dict[str, Any]:
    links, domain = {"host": _host_link(calibration)}, calibration.base.nvlink_domain_devices
    if domain is not None:
        block = _Block(calibration, "links.nvlink_domain")
        block.add("devices", None, domain)
        links["nvlink_domain"] = block.done([])
    return links | {"network": _network_link(calibration)}


def _host_link(calibration: Calibration) -> dict[str, Any]:
    base, block, link = calibration.base, _Block(calibration, "links.host"), calibration.fit_of(_LINK)
    block.add("bytes_per_s", calibration.rate(_LINK, "bytes"), base.host_link.bytes_per_s)
    block.add("latency_s", link and link.seconds_per["hops"], base.host_link.latency_s)
    block.table["kind"] = base.host_link_kind
    block.add("devices_per_host", None, base.devices_per_host)
    return block.done([_LINK])


def _network_link(calibration: Calibration) -> dict[str, Any]:
    base, block = calibration.base, _Block(calibration, "links.network")
    block.add("bytes_per_s", None, base.network_link.bytes_per_s)
    block.add("latency_s", None, base.network_link.latency_s)
    return block.done([])


def _storage(calibration: Calibration) -> dict[str, Any]:
    base, block = calibration.base, _Block(calibration, "storage")
    block.add("read_bytes_per_s", None, base.storage_read_bytes_per_s)
    block.add("write_bytes_per_s", None, base.storage_write_bytes_per_s)
    return block.done([])


def _collectives(calibration: Calibration) -> dict[str, Any]:
    base, block, link = calibration.base, _Block(calibration, "collectives"), calibration.fit_of(_LINK)
    block.add("launch_s", link and link.seconds_per["launch"], base.collective_launch_s)
    block.add("combine_threshold_bytes", None, base.combine_threshold_bytes)
    block.add("combined_launch_fraction", None, base.combined_launch_fraction)
    block.add("all_to_all_efficiency", _all_to_all_efficiency(calibration), base.all_to_all_efficiency)
    if base.kernel_slowdown:
        block.add("kernel_slowdown", None, base.kernel_slowdown)
    return block.done([_LINK, "all-to-all"])


def _all_to_all_efficiency(calibration: Calibration) -> float | None:
    """All-to-all bandwidth as a fraction of the link's, fitted with the link's launch and hop times fixed."""
    link, rate = calibration.fit_of(_LINK), calibration.rate(_LINK, "bytes")
    samples = [sample for sample in calibration.samples if sample.group == "all-to-all"]
    if link is None or rate is None or not samples:
        return None
    weights, total = 0.0, 0.0
    for sample in samples:  # least squares of relative errors in one coefficient
        fixed = link.seconds({**sample.counts, "bytes": 0.0})
        moved = sample.counts["bytes"] / sample.seconds
        weights, total = weights + moved * moved, total + moved * (1 - fixed / sample.seconds)
    per_byte = total / weights
    return min(1.0, 1 / (rate * per_byte)) if per_byte > 0 else None


class _Block:
    """Builds one block of the profile, and records which figures were measured and which come from the base."""

    def __init__(self, calibration: Calibration, name: str) -> None:
        self.calibration, self.name = calibration, name
        self.table: dict[str, Any] = {}
        self.measured: list[str] = []
        self.from_base: list[str] = []

    def chosen(self, key: str, measured: float | None, base: float) -> float:
        (self.from_base if measured is None else self.measured).append(key)
        return base if measured is None else float(f"{measured:.4g}")

    def add(self, key: str, measured: float | None, base: float) -> None:
        self.table[key] = self.chosen(key, measured, base)

    def done(self, groups: Sequence[str]) -> dict[str, Any]:
        parts = []
        if self.measured:
            fits = [found for found in map(self.calibration.fit_of, groups) if found is not None]
            parts += [self.calibration.machine.describe(), *map(describe_error, fits)]
        if self.from_base:
            base = self.calibration.base
            whence = base.sources.get(self.name, "no source")
            parts.append(f"NOT measured: {', '.join(self.from_base)}, taken from `{base.name}`, which says: {whence}")
        return {"source": "; ".join(parts), "date": self.calibration.machine.date, **self.table}


def describe_error(found: Fit) -> str:
    """`link: mean error 12 % of 60 samples (5-fold cross-validated)`."""
    if found.mean_error is None:
        return f"{found.group}: {found.num_samples} samples, too few to cross-validate"
    return f"{found.group}: mean error {found.mean_error:.0%} of {found.num_samples} samples (5-fold cross-validated)"


def describe(calibration: Calibration) -> str:
    """A table with one line per fit: rates and fixed times, errors, and the spread of the runs of a sample."""
    head = ("fit", "samples", "error", "worst", "spread", "")
    rows = [head, *(_row(found) for found in calibration.fits)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    notes = []
    if calibration.skipped:
        notes.append(f"Not timed: {len(calibration.skipped)}; the .json file says what and why.")
    notes.append("Errors are relative, of samples that the fit had not seen (5-fold cross-validation).")
    return "\n".join([line.rstrip() for line in lines] + ["", *notes])


def _row(found: Fit) -> tuple[str, ...]:
    parts = []
    for term, each in found.seconds_per.items():
        if term in ("flops", "bytes"):
            unit = {"flops": "GFLOP/s", "bytes": "GB/s"}[term]
            parts.append(f"{1 / each / 1e9:.4g} {unit}" if each > 0 else f"no time in {term}")
        else:
            parts.append(f"{each * 1e6:.3g} us per {term.removesuffix('s')}")
    errors = [f"{e:.0%}" if e is not None else "?" for e in (found.mean_error, found.worst_error)]
    return found.group, str(found.num_samples), *errors, f"{found.median_spread:.0%}", ", ".join(parts)


def as_priced(samples: Sequence[Sample], profile: Mapping[str, Any]) -> dict[str, float]:
    """Mean relative error of each group by the cost model's formulas, not cross-validated.

    They have fewer constants than the fits: a roofline with one memory bandwidth and one launch overhead, and one link.
    """
    compute, memory = profile["compute"], profile["memory"]
    link, collectives = profile["links"]["host"], profile["collectives"]
    errors: dict[str, list[float]] = {}
    for sample in samples:
        counts, group = sample.counts, sample.group
        if group in KINDS:
            share = collectives["all_to_all_efficiency"] if group == "all-to-all" else 1.0
            moved = counts["bytes"] / (link["bytes_per_s"] * share)
            priced = collectives["launch_s"] + counts["hops"] * link["latency_s"] + moved
        elif group in ("memory", "cache", "reduction") or group.startswith(("matmul ", "convolution ")):
            dtype = next((word for word in group.split() if word in MATRIX_DTYPES), "")
            of_products = compute["peak_flops_per_s"].get(dtype, 0.0)
            rate = of_products * compute["compute_efficiency"] or compute["vector_flops_per_s"]
            traffic = counts["bytes"] / memory["hbm_bytes_per_s"]
            priced = max(counts["flops"] / rate, traffic) + compute["kernel_launch_s"]
        else:
            continue
        errors.setdefault(group, []).append(abs(priced / sample.seconds - 1))
    return {group: sum(each) / len(each) for group, each in errors.items()}


# -- files ---------------------------------------------------------------------------------------


def to_json(calibration: Calibration, profile: Mapping[str, Any]) -> dict[str, Any]:
    """Samples, coefficients, errors and the profile as JSON types, in seconds, bytes and FLOPs."""
    return {
        "machine": asdict(calibration.machine),
        "base": calibration.base.name,
        "fits": [asdict(found) for found in calibration.fits],
        "mean_error_as_priced": as_priced(calibration.samples, profile),
        "profile": dict(profile),
        "skipped": [dict(each) for each in calibration.skipped],
        "samples": [asdict(sample) for sample in calibration.samples],
    }


def write(calibration: Calibration, path: Path) -> tuple[Path, Path]:
    """Write the profile to `path` (`.toml`) and the samples to `.json` in the same folder.

    Raises:
        HardwareError: a file cannot be written.
    """
    write_files(profile_files(calibration, path))
    return path, path.with_suffix(".json")


def profile_files(calibration: Calibration, path: Path) -> dict[Path, str]:
    """The texts of the samples and of the profile by their paths."""
    table = profile_table(calibration, path.stem)
    data = to_json(calibration, table)
    samples = data.pop("samples")
    # One sample per line keeps diffs readable.
    lines = ",\n".join(f"    {json.dumps(sample)}" for sample in samples)
    text = json.dumps(data, indent=2, allow_nan=False)[:-2] + f',\n  "samples": [\n{lines}\n  ]\n}}\n'
    return {path.with_suffix(".json"): text, path: toml(table)}


def write_files(files: Mapping[Path, str]) -> None:
    """Write several files, each atomically, and none before all texts are on the disk.

    Raises:
        HardwareError: a file cannot be written.
    """
    temporaries = {file: file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.tmp") for file in files}
    try:
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            temporaries[file].write_text(content, encoding="utf-8")
        for file, temporary in temporaries.items():
            temporary.replace(file)
    except OSError as error:
        raise HardwareError(
            f"cannot write the calibration to {str(list(files)[-1].with_suffix('.toml'))!r}: {error.strerror}. Give -o a .toml file in a"
            " writable folder."
        ) from error
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Format nested tables of strings, numbers and lists as TOML.

    >>> print(toml({"a": 1, "b": {"c": 2e9, "d": ["x"]}}))
    a = 1
    <BLANKLINE>
    [b]
    c = 2000000000.0
    d = ["x"]
    <BLANKLINE>
    """
    lines = [f"{key} = {_toml_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in lines)
    if prefix and lines:
        text = f"\n[{prefix}]\n{text}"
    inner = (
        toml(value, f"{prefix}{'.' * bool(prefix)}{key}") for key, value in table.items() if isinstance(value, Mapping)
    )
    return text + "".join(inner)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
