"""Price the transfers of a compiled program: collectives, sends and receives, copies between device and host memory.

In: an instruction, `ReplayRates`, the size of an NVLink domain. Out: `TransferPrice`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.xla_compiler.hlo_collectives import KINDS, groups_of, sent_bytes
from autopar.xla_compiler.hlo_metadata import Groups
from autopar.xla_compiler.hlo_text import Computation, Instruction, Module, Shape
from autopar.xla_replay.collective_time import PermutePattern, collective_s
from autopar.xla_replay.kernel_time import host_transfer_s
from autopar.xla_replay.price import TransferPrice
from autopar.xla_replay.rates import ReplayRates

_HOST_SPACE = 5


@dataclass(frozen=True, slots=True)
class TransferPrices:
    """The prices of transfers.

    Args:
        devices_per_domain: devices that NVLink connects.
    """

    rates: ReplayRates
    devices_per_domain: int

    def collective(self, module: Module, computation: Computation, one: Instruction, kind: str) -> TransferPrice:
        _, groups = groups_of(one)
        is_permute = kind == "collective-permute"
        everyone = (tuple(range(module.num_partitions)),)
        local, domains = self._extent(groups or everyone, is_permute)
        operands = sum(computation.shape_of(operand).num_bytes for operand in one.operands)
        size = 1 if is_permute else len((groups or everyone)[0])
        payload = operands * size if kind == "all-gather" else operands
        seconds = collective_s(
            self.rates,
            kind,
            payload,
            devices_per_domain=local,
            num_domains=domains,
            pattern=_pattern(groups) if is_permute else "shift",
        )
        link = self.rates.link
        return TransferPrice(
            kind=kind,
            stream="permutes" if is_permute else "collectives",
            link="network" if domains > 1 else "nvlink",
            seconds=seconds,
            slows_by=min(0.5, link.num_sms / self.rates.device.num_sms),
            num_bytes=sent_bytes(kind, payload, size),
        )

    def _extent(self, groups: Groups, is_permute: bool) -> tuple[int, int]:
        """Devices per domain, and domains, of the widest group."""
        if is_permute:
            crosses = any(self._domain(source) != self._domain(target) for source, target in groups)
            return 1 if crosses else 2, 2 if crosses else 1
        found = []
        for group in groups:
            members: dict[int, int] = defaultdict(int)
            for device in group:
                members[self._domain(device)] += 1
            # A domain with a smaller share of the group has fewer network cards, and the others wait for it.
            found.append((min(members.values()), len(members)))
        return max(found, key=lambda extent: (extent[1], extent[0]))

    def _domain(self, device: int) -> int:
        return device // self.devices_per_domain

    def peer(self, one: Instruction) -> TransferPrice:
        payload = sum(leaf.num_bytes for leaf in one.shape.leaves[:1])
        seconds = collective_s(
            self.rates, "collective-permute", payload, devices_per_domain=2, num_domains=1, pattern="one-way"
        )
        slows_by = self.rates.link.num_sms / self.rates.device.num_sms
        return TransferPrice(one.opcode, "permutes", "nvlink", seconds, slows_by, payload)

    def host_copy(self, num_bytes: float) -> TransferPrice:
        return TransferPrice(
            "host-copy", "host copies", "host", host_transfer_s(self.rates, num_bytes), num_bytes=num_bytes
        )


def host_bytes(computation: Computation, one: Instruction) -> float:
    """Bytes that an instruction moves between device and host memory; 0 if it touches device memory only."""
    operands = [computation.shape_of(operand) for operand in one.operands]
    results = one.shape.leaves
    if not any(_on_host(shape) for shape in (*operands, *results)):
        return 0.0
    # A slice of a host array moves the slice, and an update of a host array moves the update.
    if all(_on_host(result) for result in results):
        given = sum(shape.num_bytes for shape in operands if not _on_host(shape))
        return min(given, one.shape.num_bytes) or one.shape.num_bytes
    read = sum(shape.num_bytes for shape in operands if _on_host(shape))
    written = sum(result.num_bytes for result in results if not _on_host(result))
    return min(read, written) or written


def sends(module: Module, inner: Computation) -> tuple[Computation, Instruction] | None:
    """The collective in a fusion, of XLA's own collective kernels."""
    for one in inner.instructions:
        if one.opcode in KINDS:
            return inner, one
        if one.opcode == "fusion" and (found := sends(module, module.called(one)[0])) is not None:
            return found
    return None


def _on_host(shape: Shape) -> bool:
    return any(leaf.memory_space == _HOST_SPACE for leaf in shape.leaves)


def _pattern(pairs: Groups) -> PermutePattern:
    """Whether devices exchange, pass on, or only send or receive."""
    sent = {pair for pair in pairs if pair[0] != pair[1]}
    if sent and all((target, source) in sent for source, target in sent):
        return "exchange"
    return "shift" if {source for source, _ in sent} & {target for _, target in sent} else "one-way"
