"""Give the instructions of every batch of an asynchronous pipeline, from those of a few.

In: what is the same in all batches, and the schedule.
Out: `StreamProgram`. The first batches fill the pipeline and have instructions of their own. From then on every batch has the
same, on registers with higher numbers; so do the tasks that finish what is in flight. Lifetimes of registers, and what a
piece may overwrite, are settled over so many batches that every version's last reader is among them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.pipeline.partition.streamed_time import num_filling
from autopar.pipeline.run.calls_and_moves import Call, Instruction, Move
from autopar.pipeline.run.instructions import Result, own_steps
from autopar.pipeline.run.register_lifetimes import Lifetimes
from autopar.pipeline.run.stream_listing import Listed, Name, Steps, Streamed, StreamListing, dispatched
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Task
from autopar.pipeline.schedule.versions import versions_read

#: The array of each name, by its number.
Store = dict[tuple[int, int | None], Any]


@dataclass(frozen=True, slots=True)
class Window:
    """The registers of some instructions as arrays of a store, with numbers raised by `shift`. An empty register is None."""

    store: Store
    keys: Sequence[tuple[int, int | None]]
    shift: int

    def __getitem__(self, register: int) -> Any:
        return self.store.get(self._key(register))

    def __setitem__(self, register: int, value: Any) -> None:
        if value is None:
            self.store.pop(self._key(register), None)
        else:
            self.store[self._key(register)] = value

    def _key(self, register: int) -> tuple[int, int | None]:
        base, number = self.keys[register]
        return base, None if number is None else number + self.shift


@dataclass(frozen=True, slots=True)
class Run:
    """Instructions of this process, and the window through which they see the store.

    Args:
        results: the results that are complete after them: those that the caller gets for one batch.
    """

    steps: tuple[Instruction, ...]
    keys: Sequence[tuple[int, int | None]]
    shift: int
    results: tuple[tuple[Any, Result], ...] = ()

    def on(self, store: Store) -> Window:
        return Window(store, self.keys, self.shift)


class StreamProgram:
    """The instructions of every batch.

    Attributes:
        lag: the number of batches after which the results of a batch are complete; usually 0.
        filled: the first batch whose instructions are those of all later ones.
        horizon: the instructions of the first batches, with lifetimes.
        bases: the number of each name without its batch or version, by which a store has it.
    """

    def __init__(self, streamed: Streamed, kind: ScheduleKind) -> None:
        self.streamed, self.kind = streamed, kind
        self.num_stages = len(streamed.stages)
        self.bases: dict[Hashable, int] = {}
        self._ends: dict[int, Run] = {}
        self.filled = settling = num_filling(self.num_stages, streamed.num_microbatches)
        self.horizon = self._listed(2 * settling + 2, to_the_end=False)
        self._keys = self._keys_of(self.horizon.names)
        assert self._relative(self.filled) == self._relative(self.filled + 1), "batches differ after filling"
        self.lag = max((at - n for (_, n), at in self.horizon.written_in.items() if n <= self.filled), default=0)
        self._batches = [tuple(own_steps(steps, streamed.stages)) for steps in self.horizon.batches[: self.filled + 1]]

    def batch(self, n: int) -> Run:
        """The instructions of batch n, with the results of batch n - lag."""
        at = min(n, self.filled)
        return Run(self._batches[at], self._keys, n - at, self._results(self.horizon, at - self.lag))

    def end(self, num_batches: int) -> Run:
        """The instructions that finish what is in flight after so many batches."""
        listed_for = min(num_batches, self.filled)
        if listed_for not in self._ends:
            listed = self._listed(listed_for, to_the_end=True)
            steps = tuple(own_steps(listed.batches[-1], self.streamed.stages))
            late = (self._results(listed, n) for n in range(max(0, listed_for - self.lag), listed_for))
            self._ends[listed_for] = Run(
                steps, self._keys_of(listed.names), 0, tuple(one for each in late for one in each)
            )
        found = self._ends[listed_for]
        return Run(found.steps, found.keys, num_batches - listed_for, found.results)

    def key(self, name: Name) -> tuple[int, int | None]:
        """Where the store has what is named."""
        return self.bases.setdefault(name[0], len(self.bases)), name[1]

    # -- helpers -----------------------------------------------------------------------------

    def _listed(self, num_batches: int, *, to_the_end: bool) -> Listed:
        per_update = self.streamed.num_microbatches
        count = max(1, num_batches)
        schedule = build(self.kind, self.num_stages, per_update, num_updates=count)
        reads = versions_read(schedule, self.kind.reads, per_update)
        batches: list[list[Task]] = list(dispatched(self.num_stages, per_update, num_batches))
        listing = StreamListing(self.streamed, reads)
        listed = listing.run(batches if to_the_end else batches[:-1])
        shared = self._lifetimes_of(listing)
        results = {register for one in listed.results.values() for register in one.registers}
        kept, until = self._state(listing)
        if not to_the_end:
            shared.settle(listed.steps, results | kept, until)
            self._calls = {id(one.program): one for one in reversed(_calls(listed.steps))}
        else:
            shared.settle(listed.steps, results | kept, until)
            for one in _calls(listed.steps):  # what they may overwrite is decided for all batches
                one.donated, one.after_first = (
                    self._calls[id(one.program)].donated,
                    self._calls[id(one.program)].after_first,
                )
        return listed

    def _lifetimes_of(self, listing: StreamListing) -> Lifetimes:
        lifetimes = Lifetimes(self.streamed.arguments, (), by_position=False)
        lifetimes.shared |= listing.sent
        return lifetimes

    def _state(self, listing: StreamListing) -> tuple[set[int], dict[int, int]]:
        """Registers of state without a successor, and for the others the instruction that makes the successor."""
        written = {register: n for n, one in enumerate(listing.listed.steps) for register in one.writes}
        kept: set[int] = set()
        until: dict[int, int] = {}
        for leaf, (home, slot) in listing.homes.items():
            if leaf not in self.streamed.carried:
                continue
            base, number = listing.named(leaf, home, slot)
            while number is not None and (base, number + 1) in listing.at:
                after = listing.at[base, number + 1]
                until[listing.at[base, number]] = written[after]
                number += 1
            kept.add(listing.at[base, number])
        return kept, until

    def _keys_of(self, names: Iterable[Name]) -> list[tuple[int, int | None]]:
        return [self.key(name) for name in names]

    def _relative(self, n: int) -> list[Any]:
        """The instructions of a batch, with registers relative to it."""

        def relative(registers: Iterable[int]) -> tuple[Any, ...]:
            keys = (self._keys[register] for register in registers)
            return tuple((base, None if number is None else number - n) for base, number in keys)

        return [
            (
                type(one),
                (one.stage, one.key) if isinstance(one, Call) else one.crossing.wire if isinstance(one, Move) else None,
                *(relative(part) for part in (one.reads, one.writes)),
                set(relative(one.frees)),
            )
            for one in self.horizon.batches[n]
        ]

    def _results(self, listed: Listed, n: int) -> tuple[tuple[Any, Result], ...]:
        return tuple((leaf, result) for (leaf, batch), result in listed.results.items() if batch == n)


def _calls(steps: Steps) -> list[Call]:
    return [one for one in steps if isinstance(one, Call)]
