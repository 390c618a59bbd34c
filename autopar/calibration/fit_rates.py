"""Fit a few constants of the replay's rates to measured kernels and collectives.

In: `KernelSample`s, the rates to start from. Out: `RatesFit`: fitted rates, the error on held-out samples before and
after, and which constants were not fitted and why.

A group of samples (GEMMs of a dtype, fused kernels, collectives) has a few constants. Each is fitted if enough samples
depend on it. The fit minimizes the Huber loss of log(predicted / measured), one constant at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from autopar.calibration.profile_samples import KernelSample
from autopar.xla_replay.rates import ReplayRates

#: Block and key of a constant; those of GEMMs have the dtype between.
Constant: TypeAlias = tuple[str, ...]

#: Fewest samples that must depend on a constant.
FEWEST = 5
#: A sample depends on a constant whose change of 1 % changes its time by this many percent.
_DEPENDS = 0.2
#: One of so many samples is held out.
_HELD_OUT = 5
#: Most samples of one group; more are drawn at random.
_MOST = 60
_STEP = 0.02
#: A constant changes at most by this factor.
_FACTOR = 6.0
_ROUNDS = 4
_SEARCHES = 24
#: Errors of the logarithm from here on count linearly.
_HUBER = 0.1
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """A constant, before and after the fit, with the number of samples that depend on it."""

    name: str
    before: float
    after: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class GroupFit:
    """The fit of a group of samples.

    Args:
        constants: fitted constants; empty if none was.
        num_samples: samples of the group; num_held_out: those that the fit did not see.
        error_before, error_after: median relative error of the held-out samples.
    """

    group: str
    constants: tuple[FittedConstant, ...]
    num_samples: int
    num_held_out: int
    error_before: float
    error_after: float


@dataclass(frozen=True, slots=True)
class RatesFit:
    """Fitted rates.

    Args:
        not_fitted: constant or group -> the reason.
    """

    rates: ReplayRates
    groups: tuple[GroupFit, ...]
    not_fitted: Mapping[str, str]

    @property
    def constants(self) -> tuple[FittedConstant, ...]:
        return tuple(constant for group in self.groups for constant in group.constants)


def fit_rates(
    samples: Sequence[KernelSample], gaps: Sequence[float], rates: ReplayRates, devices_per_domain: int
) -> RatesFit:
    """Fit the constants that samples determine.

    Args:
        gaps: seconds between dependent kernels.
        rates: rates to start from; constants that are not fitted keep their value.
    """
    groups: list[GroupFit] = []
    not_fitted: dict[str, str] = {}
    fitted = rates
    for name, constants, members in _groups(samples, rates, devices_per_domain):
        chosen = _drawn(members)
        found, fitted = _fit_group(name, constants, chosen, fitted, devices_per_domain, not_fitted)
        if found is not None:
            groups.append(found)
    if len(gaps) >= 4 * FEWEST:
        gap = statistics.median(gaps)
        kernels = replace(fitted.kernels, gap_s=gap)
        changed = FittedConstant("kernels.gap_s", rates.kernels.gap_s, gap, len(gaps))
        fitted = replace(fitted, kernels=kernels)
        groups.append(GroupFit("gaps between kernels", (changed,), len(gaps), 0, math.nan, math.nan))
    else:
        not_fitted["kernels.gap_s"] = (
            f"too few gaps between kernels of one stream: {len(gaps)} of at least {4 * FEWEST}"
        )
    return RatesFit(fitted, tuple(groups), not_fitted)


def constant_of(rates: ReplayRates, constant: Constant) -> float:
    """The value of a constant."""
    part: Any = rates
    for name in constant:
        part = part[name] if isinstance(part, Mapping) else getattr(part, name)
    return float(part)


def with_constant(rates: ReplayRates, constant: Constant, value: float) -> ReplayRates:
    """Rates with one constant changed; a GEMM's sustained share of the peak changes with its efficiency."""
    block, *dtype, key = constant
    part: Any = getattr(rates, block)
    if dtype:
        gemm = part[dtype[0]]
        more = {"sustained_share": gemm.sustained_share * value / gemm.efficiency} if key == "efficiency" else {}
        changed: Any = {**part, dtype[0]: replace(gemm, **{key: value}, **more)}
    else:
        changed = replace(part, **{key: value})
    return replace(rates, **{block: changed})


# -- groups --------------------------------------------------------------------------------------


def _groups(
    samples: Sequence[KernelSample], rates: ReplayRates, devices_per_domain: int
) -> list[tuple[str, tuple[Constant, ...], list[KernelSample]]]:
    """Name, constants and samples of each group."""
    gemms = [one for one in samples if one.kind == "gemm"]
    found: list[tuple[str, tuple[Constant, ...], list[KernelSample]]] = []
    for dtype in rates.gemm:
        constants: tuple[Constant, ...] = tuple(
            ("gemm", dtype, key) for key in ("efficiency", "hbm_efficiency", "launch_s")
        )
        members = [one for one in gemms if _uses(one, constants, rates, devices_per_domain)]
        if members:
            found.append((f"{dtype} GEMMs", constants, members))
    others = [one for one in samples if one.kind not in ("gemm", "convolution", "attention", "custom-call", "host")]
    fused = [one for one in others if not one.link]
    found.append(("fused kernels", (("device", "hbm_efficiency"), ("kernels", "launch_s")), fused))
    convolutions = [one for one in samples if one.kind == "convolution"]
    found.append(("convolutions", (("kernels", "convolution_efficiency"),), convolutions))
    for group, link, constants in (
        ("collectives over NVLink", "nvlink", (("link", "efficiency"), ("link", "launch_s"))),
        ("collectives over the network", "network", (("network", "efficiency"),)),
        ("host copies", "host", (("host", "bytes_per_s"), ("host", "launch_s"))),
    ):
        found.append((group, constants, [one for one in others if one.link == link]))
    return found


def _uses(sample: KernelSample, constants: Sequence[Constant], rates: ReplayRates, devices_per_domain: int) -> bool:
    """Whether the time of a sample depends on any of these constants."""
    changed = rates
    for constant in constants:
        changed = with_constant(changed, constant, constant_of(rates, constant) * (1 + _STEP))
    return sample.priced_s(changed, devices_per_domain) != sample.priced_s(rates, devices_per_domain)


def _drawn(samples: Sequence[KernelSample]) -> list[KernelSample]:
    """At most `_MOST` samples in a random order that every run repeats."""
    order = np.random.default_rng(0).permutation(len(samples))
    return [samples[at] for at in order[:_MOST]]


# -- fit -----------------------------------------------------------------------------------------


def _fit_group(
    group: str,
    constants: Sequence[Constant],
    samples: Sequence[KernelSample],
    rates: ReplayRates,
    devices_per_domain: int,
    not_fitted: dict[str, str],
) -> tuple[GroupFit | None, ReplayRates]:
    """Fit the constants of a group; the rates as they were if the fit does not reduce the held-out error."""
    held_out, training = samples[::_HELD_OUT], [one for at, one in enumerate(samples) if at % _HELD_OUT]
    if len(samples) < FEWEST:
        not_fitted |= {".".join(one): f"too few {group}: {len(samples)} of at least {FEWEST}" for one in constants}
        return None, rates
    depend = {one: _num_dependent(one, samples, rates, devices_per_domain) for one in constants}
    chosen = [one for one in constants if depend[one] >= FEWEST]
    for one in constants:
        if one not in chosen:
            not_fitted[".".join(one)] = (
                f"too few {group} depend on it: {depend[one]} of {len(samples)}, {FEWEST} are needed"
            )
    before = _median_error(held_out, rates, devices_per_domain)
    fitted = rates
    for _ in range(_ROUNDS if len(chosen) > 1 else 1):
        for one in chosen:
            fitted = _best(one, training, fitted, constant_of(rates, one), devices_per_domain)
    after = _median_error(held_out, fitted, devices_per_domain)
    if chosen and after >= before:
        reason = f"the error on {len(held_out)} held-out {group} does not fall ({before:.1%} before, {after:.1%} after)"
        not_fitted |= {".".join(one): reason for one in chosen}
        chosen, fitted, after = [], rates, before
    changed = tuple(
        FittedConstant(".".join(one), constant_of(rates, one), constant_of(fitted, one), depend[one]) for one in chosen
    )
    return GroupFit(group, changed, len(samples), len(held_out), before, after), fitted


def _num_dependent(
    constant: Constant, samples: Sequence[KernelSample], rates: ReplayRates, devices_per_domain: int
) -> int:
    """Samples whose time depends on a constant."""
    value = constant_of(rates, constant)
    low, high = (with_constant(rates, constant, value * factor) for factor in (1 - _STEP, 1 + _STEP))
    count = 0
    for one in samples:
        change = one.priced_s(high, devices_per_domain) / one.priced_s(low, devices_per_domain)
        count += abs(math.log(change)) >= _DEPENDS * math.log((1 + _STEP) / (1 - _STEP))
    return count


def _best(
    constant: Constant, samples: Sequence[KernelSample], rates: ReplayRates, start: float, devices_per_domain: int
) -> ReplayRates:
    """The rates with the value of one constant that has the least loss: a golden-section search of its logarithm."""
    most = min(start * _FACTOR, 1.0) if "efficiency" in constant[-1] else start * _FACTOR

    def loss(logarithm: float) -> float:
        changed = with_constant(rates, constant, math.exp(logarithm))
        errors = (math.log(one.priced_s(changed, devices_per_domain) / one.measured_s) for one in samples)
        return sum(_huber(error) for error in errors)

    return with_constant(rates, constant, math.exp(_minimum(loss, math.log(start / _FACTOR), math.log(most))))


def _minimum(loss: Callable[[float], float], low: float, high: float) -> float:
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(_SEARCHES):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(right)
    return (low + high) / 2


def _huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size <= _HUBER else _HUBER * (size - _HUBER / 2)


def _median_error(samples: Sequence[KernelSample], rates: ReplayRates, devices_per_domain: int) -> float:
    return statistics.median(abs(one.priced_s(rates, devices_per_domain) / one.measured_s - 1) for one in samples)
