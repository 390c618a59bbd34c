"""Count the bytes that a pipeline step holds while it runs.

In: a `Pipeline` and the leaves of its arguments. Out: the results, and `Held`: for each instance of a stage, the maximum bytes of its
arrays on one of its devices, in the order of dispatch. The pipeline's own arrays count: arguments, values between
pieces, and values received from other stages; temporaries inside a piece do not. While a piece runs, its inputs and its
outputs both count, except inputs that it may overwrite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.pipeline.run.arguments import Values
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.instructions import Call


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device of each instance of a stage.

    Args:
        peak_bytes: the maximum. loop_bytes: the maximum while microbatches run.
        flight_bytes: bytes that one microbatch holds from the end of its forward pass to its backward pass; 0 if the
            stage has none. All are 0 for stages in other processes.
    """

    peak_bytes: tuple[int, ...]
    loop_bytes: tuple[int, ...]
    flight_bytes: tuple[int, ...]


def run_counted(pipeline: Pipeline, leaves: Sequence[Any]) -> tuple[list[Any], Held]:
    """Run a step, wait after each instruction, and count."""
    count = _Count(pipeline)
    values = pipeline.begin(leaves)
    count.fill(range(len(values)), values)
    for n, one in enumerate(pipeline.instructions.steps):
        before = [values[i] for i in one.reads]
        freed, one.frees = one.frees, ()
        try:
            one.run(values)
        finally:
            one.frees = freed
        jax.block_until_ready([values[i] for i in one.writes if values[i] is not None])
        donated = [i for i, value in zip(one.reads, before, strict=True) if value is not None and value.is_deleted()]
        count.empty(donated)
        count.fill(one.writes, values)
        count.note(in_loop=one.task is not None)
        for i in freed:
            values[i] = None
        count.empty(freed)
        if isinstance(one, Call) and one.key == "forward" and one.task is not None:
            count.note_flight(n, one.stage, one.task.microbatch)
    return pipeline.end(values), count.result()


class _Count:
    """Bytes by buffer, so that an array in two registers counts once."""

    def __init__(self, pipeline: Pipeline) -> None:
        instructions = pipeline.instructions
        self.stage_of = instructions.stage_of
        self.own: list[dict[int, set[int]]] = [{} for _ in pipeline.pieces]  # by microbatch, its registers
        self.last_call: dict[int, int] = {}  # register -> the last call that reads it
        for n, one in enumerate(instructions.steps):
            if isinstance(one, Call):
                self.last_call.update(dict.fromkeys(one.reads, n))
            if one.task is not None:
                for i in one.writes:
                    self.own[self.stage_of[i]].setdefault(one.task.microbatch, set()).add(i)
        for registers in self.own:  # a carry belongs to no microbatch
            times = Counter(i for of_one in registers.values() for i in of_one)
            for of_one in registers.values():
                of_one -= {i for i in of_one if times[i] > 1}
        self.buffer: dict[int, tuple[int, int]] = {}  # register -> stage, pointer
        self.holders = Counter[tuple[int, int]]()
        self.bytes: dict[tuple[int, int], int] = {}
        self.now = [0] * len(pipeline.pieces)
        self.peak = [0] * len(pipeline.pieces)
        self.loop = [0] * len(pipeline.pieces)
        self.flight = [0] * len(pipeline.pieces)

    def fill(self, registers: Sequence[int] | range, values: Values) -> None:
        for i in registers:
            self.empty([i])
            value = values[i]
            if value is None:
                continue
            shard = value.addressable_shards[0].data
            raw = jax.random.key_data(shard) if jax.numpy.issubdtype(shard.dtype, jax.dtypes.extended) else shard
            key = (self.stage_of[i], raw.unsafe_buffer_pointer())
            self.buffer[i] = key
            self.holders[key] += 1
            if self.holders[key] == 1:
                self.bytes[key] = raw.nbytes
                self.now[key[0]] += raw.nbytes

    def empty(self, registers: Sequence[int]) -> None:
        for i in registers:
            key = self.buffer.pop(i, None)
            if key is not None:
                self.holders[key] -= 1
                if not self.holders[key]:
                    self.now[key[0]] -= self.bytes.pop(key)

    def note(self, *, in_loop: bool) -> None:
        self.peak = [max(most, now) for most, now in zip(self.peak, self.now, strict=True)]
        if in_loop:
            self.loop = [max(most, now) for most, now in zip(self.loop, self.now, strict=True)]

    def note_flight(self, n: int, stage: int, microbatch: int) -> None:
        """Record what a forward pass, the `n`th instruction, leaves for later calls."""
        kept = (i for i in self.own[stage].get(microbatch, ()) if self.last_call.get(i, n) > n)
        keys = {self.buffer[i] for i in kept if i in self.buffer}
        self.flight[stage] = max(self.flight[stage], sum(self.bytes[key] for key in keys))

    def result(self) -> Held:
        return Held(tuple(self.peak), tuple(self.loop), tuple(self.flight))
