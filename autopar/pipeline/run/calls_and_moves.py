"""Define the instructions of a pipelined step: calls of pieces, transfers between submeshes, broadcasts.

In: registers, each an array or empty.
Out: `Instruction`s, which read some registers and write others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.pipeline.run.arguments import Registers, StateCrossing
from autopar.pipeline.run.broadcast import Broadcaster
from autopar.pipeline.run.moves_of_others import MovesOfOthers
from autopar.pipeline.run.piece_programs import Key, PieceProgram
from autopar.pipeline.run.transfers import Crossing
from autopar.pipeline.schedule.tasks import Task


@dataclass(slots=True)
class Call:
    """Runs a piece.

    Args:
        stage: the instance of the stage.
        task: the task that the piece belongs to; None outside the microbatch loop.
        reads: registers of the inputs.
        writes: registers of the outputs.
        frees: registers that are not used later.
        donated: a function that gives the positions in `reads` that the piece may overwrite; they are known once the
            instructions before it have run.
        after_first: a callback after the piece is compiled.
    """

    program: PieceProgram
    stage: int
    key: Key
    task: Task | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()
    donated: Callable[[], Sequence[int]] = tuple
    after_first: Callable[[], None] = lambda: None

    def run(self, values: Registers) -> None:
        inputs = [values[i] for i in self.reads]
        self.settle(inputs)
        results = self.program.jitted(*inputs)
        for i, value in zip(self.writes, results, strict=True):
            values[i] = value
        for i in self.frees:
            values[i] = None

    def settle(self, inputs: Sequence[Any]) -> None:
        """Choose the piece's programs, before its first call, for these inputs or their types."""
        if self.program.jitted is None:
            self.program.settle(self.donated(), inputs)
            self.after_first()


@dataclass(slots=True)
class Move:
    """Transfers an array to another submesh. `task` is the task that produced it."""

    crossing: Crossing | StateCrossing
    task: Task | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()

    def run(self, values: Registers) -> None:
        values[self.writes[0]] = self.crossing.move(values[self.reads[0]])
        for i in self.frees:
            values[i] = None


@dataclass(slots=True)
class Broadcast:
    """Broadcasts a small result to every process."""

    broadcaster: Broadcaster
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    task: Task | None = None
    frees: tuple[int, ...] = ()

    def run(self, values: Registers) -> None:
        values[self.writes[0]] = self.broadcaster.broadcast(values[self.reads[0]])
        for i in self.frees:
            values[i] = None


@dataclass(slots=True)
class Count:
    """Counts moves between other processes."""

    moves: MovesOfOthers
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    task: Task | None = None
    frees: tuple[int, ...] = ()

    def run(self, values: Registers) -> None:
        self.moves.count()


Instruction = Call | Move | Broadcast | Count
