"""Set when the registers of a pipelined step are freed, and which of them pieces may overwrite.

In: the instructions of a step in order, and the registers of its results.
Out: the instructions, with `frees` and `donated` set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.pipeline.run.arguments import PipelineArguments
from autopar.pipeline.run.calls_and_moves import Broadcast, Call, Move


class Lifetimes:
    """The lifetimes of registers.

    Args:
        sent_away: registers from which a replica sends to one in another process.
        by_position: whether inputs other than arguments are donated in the order in which a piece takes them: the same
            on all replicas of a stage, so that their pieces are the same.
    """

    def __init__(self, arguments: PipelineArguments, sent_away: Collection[int], *, by_position: bool) -> None:
        self.sent_away, self.by_position = sent_away, by_position
        self.num_arguments = len(arguments.stage_of)
        #: Registers that may hold the same array as another.
        self.shared = set(arguments.shared)

    def settle(
        self, steps: Sequence[Call | Move | Broadcast], results: Collection[int], until: Mapping[int, int] | None = None
    ) -> None:
        """Set when each register is freed, and which registers each piece may overwrite.

        Args:
            results: registers that are never freed.
            until: for registers that are kept longer than they are read, the position of an instruction.
        """
        last: dict[int, int] = {}
        for n, one in enumerate(steps):
            last.update(dict.fromkeys((*one.reads, *one.writes), n))
        for register, n in (until or {}).items():
            last[register] = max(n, last.get(register, n))
        for register in results:
            last.pop(register, None)
        frees: list[list[int]] = [[] for _ in steps]
        for register, n in last.items():
            frees[n].append(register)
        calls: dict[int, list[Call]] = {}
        for n, one in enumerate(steps):
            one.frees = tuple(frees[n])
            if isinstance(one, Call):
                calls.setdefault(id(one.program), []).append(one)
        for same in calls.values():
            for one in same:
                one.donated = lambda same=same: self._donated(same)
                one.after_first = lambda same=same: self._mark(same)

    def _donated(self, calls: Sequence[Call]) -> list[int]:
        """The positions of inputs that a piece may overwrite in all its calls. Arguments of the step come first, as the
        caller may hold them until the step ends unless they are donated."""
        return [
            i
            for i in sorted(range(len(calls[0].reads)), key=lambda i: self._age(i, calls[0]))
            if all(
                (one.reads[i] in one.frees or one.reads[i] in one.writes)
                and one.reads[i] not in self.shared
                and one.reads.count(one.reads[i]) == 1
                and (one.task is not None or one.reads[i] not in self.sent_away)  # it may be on its way
                for one in calls
            )
        ]

    def _age(self, i: int, call: Call) -> tuple[int, int]:
        """The order in which inputs are donated."""
        register = call.reads[i]
        return (int(register >= self.num_arguments), i) if self.by_position else (register, i)

    def _mark(self, calls: Sequence[Call]) -> None:
        """Record the outputs of a compiled piece that may share their memory with other arrays."""
        gives, taken = calls[0].program.shared
        for one in calls:
            self.shared.update(one.writes[i] for i in gives)
            self.shared.update(one.reads[i] for i in taken)
