"""Extract samples from a profile: the measured and the replayed time of each kernel and collective.

In: a profile with its HLO, the replay's rates. Out: `KernelSample`s; instructions with the same work are one sample.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from autopar.xla_compiler.hlo_text import Computation, Instruction, Module
from autopar.xla_profile.profile import Profile, by_instruction, operations
from autopar.xla_replay.device_prices import DevicePrices
from autopar.xla_replay.price import KernelPrice, TransferPrice
from autopar.xla_replay.program import replay_module
from autopar.xla_replay.rates import ReplayRates

#: Gaps between kernels up to this many seconds are of the device; longer ones are waits for the host.
_LONGEST_GAP_S = 20e-6


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One run of a kernel or a transfer, alone on its device.

    Args:
        kind: as the replay names it: `gemm`, `fusion`, `all-reduce`, ...
        link: `nvlink`, `network` or `host` of a transfer; empty for kernels.
        measured_s: median over the runs.
        flops, num_bytes: work of one run; of a transfer, the bytes that a device sends.
    """

    name: str
    kind: str
    link: str
    measured_s: float
    flops: float
    num_bytes: float
    module: Module = field(repr=False, compare=False)
    computation: Computation = field(repr=False, compare=False)
    instruction: Instruction = field(repr=False, compare=False)

    def priced_s(self, rates: ReplayRates, devices_per_domain: int) -> float:
        """Seconds by the replay's formulas, without the gap between kernels."""
        price = DevicePrices(rates, devices_per_domain).of(self.module, self.computation, self.instruction)
        return _alone_s(price, rates)


def kernel_samples(
    profile: Profile, module: Module, rates: ReplayRates, devices_per_domain: int
) -> tuple[tuple[KernelSample, ...], tuple[str, ...]]:
    """The samples of a profile, and what was left out.

    Kernels that only ran beside a transfer are left out, for it slows them. The time of a collective is the least over
    devices of each run: the other devices wait for the last one.
    """
    prices = DevicePrices(rates, devices_per_domain)
    replayed = {one.name: one for one in replay_module(module, prices).operations}
    known = by_instruction(module)
    measured: dict[tuple[str, str, float, float, float], list[float]] = defaultdict(list)
    first: dict[tuple[str, str, float, float, float], tuple[str, Computation, Instruction]] = {}
    left_out: Counter[str] = Counter()
    for one in operations(profile):
        priced = replayed.get(one.operation)
        if priced is None or not priced.count:
            left_out["no instruction of the HLO" if one.operation.startswith("(") else "not in the replay"] += 1
            continue
        seconds = one.fastest_s if one.kind else one.alone_s
        if seconds is None:
            left_out["ran beside a collective only"] += 1
            continue
        computation, instruction = _issued(module, known[one.operation])
        price = prices.of(module, computation, instruction)
        link = price.link if isinstance(price, TransferPrice) else ""
        key = (priced.kind, link, price.seconds, price.flops, price.num_bytes)
        measured[key].append(seconds)
        first.setdefault(key, (one.operation, computation, instruction))
    samples = tuple(
        KernelSample(
            name=first[key][0],
            kind=key[0],
            link=key[1],
            measured_s=statistics.median(seconds),
            flops=key[3],
            num_bytes=key[4],
            module=module,
            computation=first[key][1],
            instruction=first[key][2],
        )
        for key, seconds in measured.items()
        if statistics.median(seconds) > 0
    )
    return samples, tuple(f"{count} operations left out: {why}" for why, count in left_out.items())


def kernel_gaps(profile: Profile) -> list[float]:
    """Times between a kernel and the next one of its stream, up to the longest gap that is no wait for the host."""
    found = []
    for step in profile.steps:
        ends: dict[str, float] = {}
        for run in step.runs:
            if run.kind:
                continue
            gap = run.start_s - ends.get(run.stream, float("-inf"))
            if 0 <= gap <= _LONGEST_GAP_S:
                found.append(gap)
            ends[run.stream] = run.end_s
    return found


def _issued(module: Module, one: Instruction) -> tuple[Computation, Instruction]:
    """An instruction, or the one that an asynchronous pair runs, with its computation."""
    if one.opcode == "async-start" and (called := module.called(one)):
        return called[0], called[0].root
    return module.computations[one.computation], one


def _alone_s(price: KernelPrice | TransferPrice, rates: ReplayRates) -> float:
    """Seconds of a price; a kernel's includes the gap after it."""
    if isinstance(price, TransferPrice) or price.seconds <= 0:
        return price.seconds
    return max(price.seconds - rates.kernels.gap_s, 1e-9)
