"""Faults put into a compiled program, and by how much they change the replayed step time.

The program is torchtitan's compiled Llama-3.1-8B on 8 GPUs (`published.py`), as XLA compiled it. Each fault edits the
parsed module or the rates. "Must be" is computed without the replay: from the prices of single instructions and how
often each computation runs.

- A doubled collective that nothing hides takes its own time again.
- A doubled collective that kernels hide takes from them the multiprocessors that it occupies, and nothing else.
- A loop of 32 iterations instead of one takes 31 times what its body takes.
- Collectives that are all synchronous make the step the sum of all its kernels and collectives.
- Links of half the rate double the time that the bytes of synchronous collectives take.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from autopar.xla_compiler.hlo_text import Computation, Instruction, Module, parse_module
from autopar.xla_replay import rates as replay_rates
from autopar.xla_replay.device_prices import DevicePrices
from autopar.xla_replay.price import TransferPrice
from autopar.xla_replay.program import replay_module
from autopar.xla_replay.rates import ReplayRates
from benchmarks.replay.llama import attention_kernels
from benchmarks.replay.published import RUNS, Run, compiled

Record = dict[str, Any]
#: A computation, one of its instructions, how often it runs, and its price.
Priced = tuple[Computation, Instruction, float, Any]

RUN = next(run for run in RUNS if run.name.endswith("8 H100 of 96 GB: compiled"))
TOLERANCE = 0.02
#: Opcodes that have no price of their own.
_STRUCTURE = frozenset(
    ["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "while", "call"]
)


def rows() -> list[Record]:
    """One row for each fault."""
    module, rates = parse_module(compiled(RUN).hlo_text), replay_rates.load(RUN.rates)
    found = [_row(*fault) for fault in _faults(_Program(module, rates, RUN))]
    print(*found, sep="\n", file=sys.stderr)
    return found


class _Program:
    """A module with its prices."""

    def __init__(self, module: Module, rates: ReplayRates, run: Run) -> None:
        self.module, self.rates, self.run = module, rates, run
        self.prices = DevicePrices(rates, 8, attention_kernels(run.model, run.cp))
        self.step_s = replay_module(module, self.prices).step_time_s

    def edited(self, module: Module) -> _Program:
        return _Program(module, self.rates, self.run)

    def priced(self, computation: Computation, times: float = 1.0) -> Iterator[Priced]:
        """The kernels and transfers of a computation and of the loops in it."""
        for one in computation.instructions:
            if one.opcode == "while":
                body = self.module.computations[one.attribute("body").lstrip("%")]
                yield from self.priced(body, times * (one.trip_count or 1))
            elif one.opcode == "call":
                yield from self.priced(self.module.called(one)[0], times)
            elif one.opcode not in _STRUCTURE and not one.opcode.endswith(("-done", "-update")):
                inner = self.module.called(one) if one.opcode == "async-start" else ()
                within, what = (inner[0], inner[0].root) if inner else (computation, one)
                yield computation, one, times, self.prices.of(self.module, within, what)


def _faults(program: _Program) -> Iterator[tuple[str, str, float, float, float]]:
    """Each fault: its name, where it is, the step time before and after it, and the change that it must make."""
    module, entry = program.module, program.module.main
    transfers = [one for one in program.priced(entry) if isinstance(one[3], TransferPrice)]

    computation, one, times, price = max(
        (found for found in transfers if not found[1].opcode.endswith("-start")), key=lambda found: found[3].seconds
    )
    after = program.edited(_with(module, computation, _doubled(computation, one)))
    yield "exposed collective doubled", one.name, program.step_s, after.step_s, times * price.seconds

    computation, one, times, price = max(
        (found for found in transfers if found[1].opcode.endswith("-start") and found[2] > 1),
        key=lambda found: found[3].seconds,
    )
    after = program.edited(_with(module, computation, _doubled(computation, one)))
    slowed = times * price.seconds * price.slows_by
    yield "hidden collective doubled", one.name, program.step_s, after.step_s, slowed

    loop = max((one for one in entry.instructions if one.opcode == "while"), key=lambda one: one.trip_count or 0)
    once, often = (program.edited(_with(module, entry, _repeated(entry, loop, count))) for count in (1, 32))
    body = module.computations[loop.attribute("body").lstrip("%")]
    seconds = sum(
        price.seconds * (price.slows_by if isinstance(price, TransferPrice) else 1.0)
        for _, _, _, price in program.priced(body)
    )
    yield "loop of 32 iterations instead of 1", loop.name, once.step_s, often.step_s, 31 * seconds

    serial = program.edited(_synchronous(module))
    total = sum(times * price.seconds for _, _, times, price in program.priced(entry))
    yield "all collectives synchronous", "", program.step_s, serial.step_s, total - program.step_s

    slow = _Program(serial.module, _slower_links(program.rates), program.run)
    longer = sum(times * _halved_s(program.rates, price) for _, _, times, price in transfers)
    yield "links of half the rate, collectives synchronous", "", serial.step_s, slow.step_s, longer


def _row(fault: str, where: str, before: float, after: float, must: float) -> Record:
    change = after - before
    return {
        "fault": fault,
        "where": where,
        "before_ms": round(1e3 * before, 3),
        "after_ms": round(1e3 * after, 3),
        "change_ms": round(1e3 * change, 3),
        "must_be_ms": round(1e3 * must, 3),
        "off": round(change / must - 1, 4),
        "holds": abs(change / must - 1) <= TOLERANCE,
    }


# -- edits -------------------------------------------------------------------------------------


def _with(module: Module, computation: Computation, edited: Computation) -> Module:
    return replace(module, computations=module.computations | {computation.name: edited})


def _edited(computation: Computation, edit: Callable[[Instruction], Iterator[Instruction]]) -> Computation:
    return Computation(computation.name, tuple(new for one in computation.instructions for new in edit(one)))


def _doubled(computation: Computation, collective: Instruction) -> Computation:
    """A second collective behind the first one, with its own end where it is asynchronous."""
    again = replace(collective, name=f"{collective.name}.again")

    def edit(one: Instruction) -> Iterator[Instruction]:
        yield one
        if one is collective:
            yield again
        elif one.opcode.endswith("-done") and one.operands[0].name == collective.name:
            yield replace(
                one, name=f"{one.name}.again", operands=(replace(one.operands[0], name=again.name),), is_root=False
            )

    return _edited(computation, edit)


def _repeated(computation: Computation, loop: Instruction, count: int) -> Computation:
    attributes = re.sub(r'("known_trip_count":\{"n":")\d+', rf"\g<1>{count}", loop.attributes)

    def edit(one: Instruction) -> Iterator[Instruction]:
        yield replace(loop, attributes=attributes) if one is loop else one

    return _edited(computation, edit)


def _synchronous(module: Module) -> Module:
    """Every end of an asynchronous collective directly behind its start."""
    found = {}
    for computation in module.computations.values():
        ends = defaultdict(list)
        for one in computation.instructions:
            if one.opcode.endswith("-done"):
                ends[one.operands[0].name].append(one)
        moved = {end.name for name in ends for end in ends[name]}
        order = [
            new for one in computation.instructions if one.name not in moved for new in (one, *ends.get(one.name, ()))
        ]
        found[computation.name] = Computation(computation.name, tuple(order))
    return replace(module, computations=found)


# -- links -------------------------------------------------------------------------------------


def _slower_links(rates: ReplayRates) -> ReplayRates:
    link = rates.link
    return replace(
        rates,
        link=replace(
            link,
            bytes_per_s=link.bytes_per_s / 2,
            copy_bytes_per_s=link.copy_bytes_per_s / 2,
            reduce_bytes_per_s=link.reduce_bytes_per_s / 2,
        ),
    )


def _halved_s(rates: ReplayRates, price: TransferPrice) -> float:
    """Seconds that a ring of 8 over NVLink takes longer at half the rate: its bytes twice as long, and the root of two
    for filling its pipeline of chunks."""
    link = rates.link
    rounds = 2 if price.kind == "all-reduce" else 1
    copying = {
        "all-gather": 1 / link.copy_bytes_per_s,
        "reduce-scatter": 1 / link.reduce_bytes_per_s,
        "all-reduce": 1 / link.copy_bytes_per_s + 1 / link.reduce_bytes_per_s,
    }[price.kind]
    buffer = price.num_bytes * 8 / 7 / rounds
    moved = math.hypot(price.num_bytes / (link.bytes_per_s * link.efficiency), buffer * copying)
    return moved + 2 * (math.sqrt(2) - 1) * math.sqrt(moved * link.chunk_s * 7 * rounds)


if __name__ == "__main__":
    rows()
