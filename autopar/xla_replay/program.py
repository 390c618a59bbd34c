"""Replay a scheduled HLO program: kernels in order, transfers on streams of their own, loops by their trip counts.

In: a `Module` in XLA's schedule, and `Prices`. Out: `Replay`. A loop of n iterations is replayed twice, and the second
iteration stands for the other n - 1: from then on no iteration differs from the one before.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from autopar.errors import VerifyError
from autopar.xla_compiler.hlo_collectives import source_of
from autopar.xla_compiler.hlo_text import Computation, Instruction, Module
from autopar.xla_replay.price import KernelPrice, Prices, TransferPrice
from autopar.xla_replay.replay import Event, OperationTime, Replay
from autopar.xla_replay.streams import Streams, Transfer

#: Instructions that run nothing on the device.
_FREE = frozenset(
    ["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "add-dependency"]
)
#: Longest timeline that is kept, in events.
_MOST_EVENTS = 200_000


def replay_module(module: Module, prices: Prices, *, unknown_trip_count: int = 1) -> Replay:
    """Replay the entry computation of a module.

    Args:
        unknown_trip_count: assumed trip count of a loop whose trip count XLA does not know.

    Raises:
        VerifyError: the module is not scheduled: the order of its instructions is then not that of the run.
    """
    if not module.is_scheduled:
        raise VerifyError(
            f"module {module.name!r} is not scheduled, so the order of its instructions means nothing; pass the compiled"
            " program (`lowered.compile().as_text()`, or XLA's dump `*after_optimizations.txt`)"
        )
    return _Replaying(module, prices, unknown_trip_count).run()


@dataclass(slots=True)
class _Total:
    """What one instruction has taken so far."""

    one: Instruction
    price: KernelPrice | TransferPrice
    seconds: float = 0.0
    exposed_s: float = 0.0
    count: float = 0.0


@dataclass(slots=True)
class _Issued:
    """A transfer on its way, with the instruction that issued it."""

    transfer: Transfer
    total: _Total


@dataclass
class _Replaying:
    """The one mutable object of this module."""

    module: Module
    prices: Prices
    unknown_trip_count: int
    streams: Streams = field(default_factory=Streams)
    totals: dict[tuple[str, str], _Total] = field(default_factory=dict)
    issued: dict[tuple[str, str], _Issued] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[Event] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)  # in order, without repetition
    kernels_s: float = 0.0

    def run(self) -> Replay:
        self._computation(self.module.main, 1.0)
        for kind, seconds in self.streams.drain().items():
            self.exposed[kind] += seconds
        transfers = [
            Event(one.label, one.stream, one.start_s or 0.0, one.end_s or 0.0) for one in self.streams.finished
        ]
        rows = sorted(self.totals.values(), key=lambda total: -total.seconds)
        return Replay(
            step_time_s=self.streams.now,
            kernels_s=self.kernels_s,
            exposed_s={kind: seconds for kind, seconds in sorted(self.exposed.items()) if seconds > 0},
            operations=tuple(self._row(total) for total in rows),
            events=tuple(sorted((*self.events, *transfers), key=lambda event: event.start_s)),
            notes=tuple(self.notes),
        )

    def _computation(self, computation: Computation, weight: float) -> None:
        for one in computation.instructions:
            self._instruction(computation, one, weight)

    def _instruction(self, computation: Computation, one: Instruction, weight: float) -> None:
        opcode = one.opcode
        if opcode in _FREE or (opcode.endswith("-update") and opcode.startswith(("async", "copy"))):
            return
        if opcode == "while":
            self._loop(one, weight)
        elif opcode == "conditional":
            self._branch(one, weight)
        elif opcode == "call":
            self._computation(self.module.called(one)[0], weight)
        elif opcode.endswith("-done"):
            self._wait(computation, one, weight)
        elif opcode.endswith("-start") or opcode in ("send", "recv"):
            self._start(computation, one, weight)
        else:
            price = self.prices.of(self.module, computation, one)
            if isinstance(price, TransferPrice):
                self._issue(computation, one, price, weight)
                self._wait(computation, one, weight)
            else:
                self._kernel(one, price, weight)

    def _kernel(self, one: Instruction, price: KernelPrice, weight: float) -> None:
        start = self.streams.run(price.seconds)
        seconds = self.streams.now - start
        self.kernels_s += weight * seconds
        total = self._total(one, price)
        total.seconds += weight * seconds
        total.count += weight
        if len(self.events) < _MOST_EVENTS:
            self.events.append(Event(one.name, "kernels", start, self.streams.now, one.op_name))

    def _start(self, computation: Computation, one: Instruction, weight: float) -> None:
        inner = self.module.called(one) if one.opcode == "async-start" else ()
        within, what = (inner[0], inner[0].root) if inner else (computation, one)
        price = self.prices.of(self.module, within, what)
        if isinstance(price, KernelPrice):
            # Kernels beside the main stream share its multiprocessors, so they gain nothing.
            self._kernel(one, price, weight)
        else:
            self._issue(computation, one, price, weight)

    def _issue(self, computation: Computation, one: Instruction, price: TransferPrice, weight: float) -> None:
        total = self._total(one, price)
        total.count += weight
        total.seconds += weight * price.seconds
        transfer = Transfer(price.kind, price.stream, price.link, price.seconds, price.slows_by, one.name)
        self.issued[computation.name, one.name] = _Issued(self.streams.start(transfer), total)

    def _wait(self, computation: Computation, one: Instruction, weight: float) -> None:
        """Wait for the transfer that an instruction, or the start that it names, issued."""
        name = one.operands[0].name if one.opcode.endswith("-done") else one.name
        found = self.issued.pop((computation.name, name), None)
        if found is None:
            return  # a kernel that ran at its start, or a start in an earlier iteration
        for kind, seconds in self.streams.wait(found.transfer).items():
            self.exposed[kind] += weight * seconds
            found.total.exposed_s += weight * seconds

    def _loop(self, one: Instruction, weight: float) -> None:
        count = one.trip_count
        body = self.module.computations[one.attribute("body").lstrip("%")]
        condition = self.module.computations[one.attribute("condition").lstrip("%")]
        if count is None:
            count = self.unknown_trip_count
            self.notes[f"loop {one.name!r}: XLA does not know its trip count; {count} assumed"] = None
        second_s = 0.0
        for iteration in range(min(count, 2)):
            start = self.streams.now
            times = weight * (count - 1 if iteration else 1)
            if one.trip_count is None:
                self._computation(condition, times)
                self._kernel(one, self.prices.host_round_trip(), times)
            self._computation(body, times)
            self._settle(body, times)
            second_s = self.streams.now - start
        if count > 2:
            start = self.streams.now
            self.streams.skip((count - 2) * second_s)
            self.events.append(Event(f"{count - 2} more iterations of {one.name}", "loops", start, self.streams.now))

    def _settle(self, body: Computation, weight: float) -> None:
        """Wait for what an iteration issued and left to a later one."""
        for key in [key for key in self.issued if key[0] == body.name]:
            found = self.issued.pop(key)
            for kind, seconds in self.streams.wait(found.transfer).items():
                self.exposed[kind] += weight * seconds
                found.total.exposed_s += weight * seconds

    def _branch(self, one: Instruction, weight: float) -> None:
        """Run the branch that takes longest."""
        branches = self.module.called(one)
        self._kernel(one, self.prices.host_round_trip(), weight)
        if branches:
            longest = max(branches, key=self._serial_s)
            self._computation(longest, weight)
            self.notes[f"conditional {one.name!r}: its longest branch, {longest.name!r}, is assumed"] = None

    def _serial_s(self, computation: Computation) -> float:
        """Seconds of a computation, nothing overlapped."""
        other = _Replaying(self.module, self.prices, self.unknown_trip_count)
        other._computation(computation, 1.0)
        other.streams.drain()
        return other.streams.now

    def _total(self, one: Instruction, price: KernelPrice | TransferPrice) -> _Total:
        for note in price.notes:
            self.notes[note] = None
        return self.totals.setdefault((one.computation, one.name), _Total(one, price))

    def _row(self, total: _Total) -> OperationTime:
        one, price = total.one, total.price
        return OperationTime(
            name=one.name,
            kind=price.kind,
            count=total.count,
            seconds=total.seconds,
            exposed_s=total.exposed_s if isinstance(price, TransferPrice) else 0.0,
            flops=total.count * price.flops,
            num_bytes=total.count * price.num_bytes,
            bound=price.bound,
            op_name=one.op_name,
            source=source_of(one, self.module.sources)[0],
        )
