"""Predict the seconds of one collective, as NCCL runs it over NVLink and the network.

In: an HLO collective, bytes, the shape of its group, `ReplayRates`. Out: seconds from start to end on every device.

Bytes are those of the full buffer of one device:

- all-reduce, collective-permute, collective-broadcast: the operand;
- all-gather: the result, all devices' parts together;
- reduce-scatter: the operand, before it is cut;
- all-to-all, ragged-all-to-all: the operand, the parts for all devices together.

NCCL has algorithms and protocols, and so has this model; the fastest pair wins, as in NCCL's tuner:

- ring, in every protocol: n - 1 steps (all-reduce 2 (n - 1)), each moves 1/n of the bytes to the neighbour;
- tree over domains, for all-reduce: depth log2(domains) instead of their number;
- PAT, the same for all-gather and reduce-scatter where each domain has one device: only in protocol Simple;
- NVLS: the NVLink switch adds and multicasts, so an all-reduce takes one step; between domains it is combined with a
  tree;
- LL and LL128 have short steps and send flags with the data (half, 120 of 128 bytes of payload); Simple has long steps
  and full bandwidth, in chunks that are pipelined.

Wire and kernel of a ring overlap in part: the time of both is the root of the sum of squares. A chunk size that is best
for time t and latency c leaves 2 sqrt(t c) for filling the pipeline.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from autopar.errors import HardwareError
from autopar.xla_compiler.hlo_collectives import KINDS
from autopar.xla_replay.rates import ReplayRates

#: Pairs of a collective-permute: all devices send to a neighbour and receive from another one; pairs of devices
#: exchange; devices send or receive, never both.
PermutePattern = Literal["shift", "exchange", "one-way"]

#: Time on the wire relative to Simple, of LL (half of the bytes are flags, stores are short) and LL128.
_PROTOCOL_COST = (4.0, 128 / 120)
_LL, _LL128, _SIMPLE = range(3)
#: Share of the bandwidth that NCCL's tuner expects of PAT.
_PAT_EFFICIENCY = 0.75
#: Channels that NCCL adds at most to those that a message to one peer starts with.
_MOST_CHANNEL_FACTOR = 8.0


def collective_s(
    rates: ReplayRates,
    kind: str,
    num_bytes: float,
    *,
    devices_per_domain: int,
    num_domains: int,
    share: float = 1.0,
    pattern: PermutePattern = "shift",
) -> float:
    """Seconds of a collective that nothing else slows down.

    Args:
        kind: HLO's name, one of `KINDS`.
        num_bytes: bytes as the module's docstring defines them.
        devices_per_domain: devices of the group in each NVLink domain.
        num_domains: NVLink domains that the group spans. A collective-permute between domains has `num_domains` above 1.
        share: part of the links' bandwidth that this collective gets while others use the same links.
        pattern: pairs of a collective-permute.

    Raises:
        HardwareError: an unknown kind, or a group without devices.
    """
    if kind not in KINDS:
        raise HardwareError(f"the replay knows no collective {kind!r}; HLO has {', '.join(KINDS)}")
    if devices_per_domain < 1 or num_domains < 1 or not 0 < share <= 1:
        raise HardwareError(
            f"a group of {devices_per_domain} devices in each of {num_domains} domains with {share} of the links:"
            f" both counts must be positive, the share above 0 and at most 1"
        )
    if num_bytes <= 0:
        return 0.0
    group = (np.array([float(count)]) for count in (num_bytes, devices_per_domain, num_domains))
    return float(collective_seconds(rates, kind, *group, share=share, pattern=pattern)[0])


def collective_seconds(
    rates: ReplayRates,
    kind: str,
    num_bytes: Any,
    devices_per_domain: Any,
    num_domains: Any,
    *,
    share: float = 1.0,
    pattern: PermutePattern = "shift",
) -> Any:
    """Seconds of many collectives of one kind at once; arrays of one shape in, an array of that shape out."""
    one = _Collective(rates, num_bytes, devices_per_domain, num_domains, share)
    if kind in ("all-gather", "reduce-scatter"):
        kernel = rates.link.copy_bytes_per_s if kind == "all-gather" else rates.link.reduce_bytes_per_s
        seconds = np.minimum(np.minimum(one.ring(1, num_bytes / kernel), one.switch(1)), one.parallel_trees())
    elif kind == "all-reduce":
        kernel = num_bytes / rates.link.copy_bytes_per_s + num_bytes / rates.link.reduce_bytes_per_s
        seconds = np.minimum(np.minimum(one.ring(2, kernel), one.tree(kernel)), one.switch(2))
    elif kind in ("all-to-all", "ragged-all-to-all"):
        seconds = one.exchange()
    elif kind == "collective-permute":
        seconds = one.permute(pattern)
    else:
        seconds = one.broadcast()
    alone = 2 * num_bytes / (rates.device.hbm_bytes_per_s * rates.device.hbm_efficiency) + rates.kernels.launch_s
    return np.where((one.num_devices > 1) | (kind == "collective-permute"), seconds, alone)


class _Collective:
    """Bytes and groups of some collectives, with the algorithms that move them."""

    def __init__(self, rates: ReplayRates, num_bytes: Any, local: Any, domains: Any, share: float) -> None:
        self.link, self.network = rates.link, rates.network
        self.num_bytes, self.local, self.domains = num_bytes, local, domains
        self.num_devices = local * domains
        self.crosses = domains > 1
        self.link_bytes_per_s = self.link.bytes_per_s * self.link.efficiency * share
        self.network_bytes_per_s = self.network.bytes_per_s * self.network.efficiency * share
        self.skew = self.link.skew_s * np.log2(np.maximum(self.num_devices, 2))

    def ring(self, rounds: int, kernel: Any) -> Any:
        """Each device sends (n - 1) / n of the bytes to its neighbour in every round; `kernel` is the copying's time."""
        wire = rounds * self.num_bytes * (1 - 1 / self.num_devices)
        inside = np.hypot(np.where(self.local > 1, wire / self.link_bytes_per_s, 0.0), kernel)
        between = wire / (self.local * self.network_bytes_per_s)
        moved = np.where(self.crosses, np.maximum(inside, between), inside)
        steps = rounds * (self.num_devices - 1)
        network_steps = np.where(self.crosses, rounds * (self.domains - 1), 0.0)
        start = self.link.launch_s + rounds * self.skew
        return start + self._fastest_protocol(moved, steps - network_steps, network_steps)

    def tree(self, kernel: Any) -> Any:
        """All-reduce over domains as two binary trees: chains inside a domain, log2(domains) levels between them."""
        wire = 2 * self.num_bytes
        inside = np.hypot(np.where(self.local > 1, wire / self.link_bytes_per_s, 0.0), kernel)
        moved = np.maximum(inside, wire / (self.local * self.network_bytes_per_s))
        levels = 2 * np.ceil(np.log2(np.maximum(self.domains, 2)))
        start = self.link.launch_s + 2 * self.skew
        seconds = start + self._fastest_protocol(moved, 2 * (self.local - 1), levels)
        return np.where(self.crosses, seconds, np.inf)

    def parallel_trees(self) -> Any:
        """All-gather or reduce-scatter over domains of one device each, in log2(domains) steps (NCCL's PAT)."""
        moved = self.num_bytes * (1 - 1 / self.num_devices) / (self.network_bytes_per_s * _PAT_EFFICIENCY)
        levels = np.ceil(np.log2(np.maximum(self.domains, 2)))
        seconds = self.link.launch_s + self.skew + self.link.latency_scale * self.link.start_s[_SIMPLE]
        seconds = seconds + levels * self.network.step_s[_SIMPLE] + _pipelined(moved, self.link.chunk_s * levels)
        return np.where(self.crosses & (self.local == 1), seconds, np.inf)

    def switch(self, rounds: int) -> Any:
        """The switch adds and multicasts inside a domain; an all-reduce continues as a tree between domains."""
        if not self.link.nvls:
            return np.full_like(self.num_bytes, np.inf)
        inside = self.num_bytes / (self.link_bytes_per_s * self.link.nvls_efficiency)
        between = rounds * self.num_bytes * (1 - 1 / self.domains) / (self.local * self.network_bytes_per_s)
        latency = self.link.latency_scale * self.link.nvls_start_s
        levels = 2 * np.ceil(np.log2(np.maximum(self.domains, 1)))
        seconds = self.link.launch_s + rounds * self.skew + latency + levels * self.network.tree_step_s
        seconds = seconds + _pipelined(np.maximum(inside, between), 2 * self.link.chunk_s)
        usable = (self.local > 2) & ((rounds == 2) | ~self.crosses)
        return np.where(usable, seconds, np.inf)

    def exchange(self) -> Any:
        """Every device sends 1/n of its bytes to every other one."""
        inside = self.num_bytes * (self.local - 1) / self.num_devices / self.link_bytes_per_s
        inside = np.hypot(inside, self.num_bytes / self.link.exchange_bytes_per_s)
        between = self.num_bytes * (1 - 1 / self.domains) / self.network_bytes_per_s
        start = self.link.exchange_start_s + (self.local - 1) * self.link.latency_scale * self.link.step_s[_LL]
        posts = (self.num_devices - self.local) * self.network.overhead_s
        start = start + np.where(self.crosses, self.network.step_s[_LL] + posts, 0.0)
        start = start + self.link.launch_s + self.skew
        return start + _pipelined(np.maximum(inside, between), self.link.exchange_chunk_s)

    def permute(self, pattern: PermutePattern) -> Any:
        """Every device sends its bytes to one other device."""
        limit = self.link.channel_limit_bytes
        doublings = np.ceil(np.log2(np.maximum(self.num_bytes / limit, 1)))
        factor = np.minimum(2.0**doublings, _MOST_CHANNEL_FACTOR)
        shared = (pattern == "shift") | ((pattern == "exchange") & (factor > 1))
        channels = self.link.channel_bytes_per_s * np.where(shared, self.link.channel_share, 1.0)
        link = np.hypot(1 / self.link_bytes_per_s, 1 / self.link.send_bytes_per_s)
        seconds_per_byte = np.maximum(link, 1 / (channels * factor))
        network = np.where(self.crosses, 1 / self.network_bytes_per_s, 0.0)
        short = self.num_bytes * np.maximum(_PROTOCOL_COST[_LL] / channels, 2 * network) + self._step(_LL)
        chunk = self.link.exchange_chunk_s
        long = _pipelined(self.num_bytes * np.maximum(seconds_per_byte, network), chunk)
        long = long + self.link.latency_scale * self.link.start_s[_SIMPLE] + self._step(_SIMPLE)
        return self.link.launch_s + np.minimum(short, long)

    def broadcast(self) -> Any:
        """A chain: the bytes pass every device in chunks."""
        inside = np.hypot(self.num_bytes / self.link_bytes_per_s, self.num_bytes / self.link.copy_bytes_per_s)
        between = self.num_bytes / (self.local * self.network_bytes_per_s)
        moved = np.where(self.crosses, np.maximum(inside, between), inside)
        network_steps = np.where(self.crosses, self.domains - 1, 0.0)
        return (
            self.link.launch_s
            + self.skew
            + self._fastest_protocol(moved, self.num_devices - 1 - network_steps, network_steps)
        )

    def _step(self, protocol: int) -> Any:
        inside = self.link.latency_scale * self.link.step_s[protocol]
        return np.where(self.crosses, self.network.step_s[protocol], inside)

    def _fastest_protocol(self, moved: Any, steps: Any, network_steps: Any) -> Any:
        """Seconds of the fastest protocol for `moved` seconds at full bandwidth and these steps inside and between domains."""
        found = []
        for protocol in (_LL, _LL128, _SIMPLE):
            inside = self.link.latency_scale * self.link.step_s[protocol]
            inside = np.where(self.crosses, np.maximum(inside, self.network.overhead_s), inside)
            latency = self.link.latency_scale * self.link.start_s[protocol]
            latency = latency + steps * inside + network_steps * self.network.step_s[protocol]
            if protocol == _SIMPLE:
                found.append(latency + _pipelined(moved, self.link.chunk_s * (steps + network_steps)))
            else:
                found.append(latency + moved * _PROTOCOL_COST[protocol])
        return np.minimum.reduce(found)


def _pipelined(moved: Any, chunk_s: Any) -> Any:
    return moved + 2 * np.sqrt(moved * chunk_s)
