"""What the scheduler is asked, what it decides, and what it is told: plain values, without a model or a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.inference.kv_cache.page_tables import Copy


@dataclass(frozen=True, slots=True)
class Request:
    """Text to be continued.

    Args:
        name: by which it is spoken of; of all requests that are not ended, one has it.
        prompt: tokens, at least one.
        max_tokens: to generate, at most.
        stop_tokens: after any of which it ends.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()


class Shape(NamedTuple):
    """The static sizes of an iteration: each is one compiled program. Slots there are always the same number of.

    Args:
        width: tokens of each slot: 1, or more where proposals are verified.
        steps: tokens that each slot generates one after the other.
        rows, length: of the chunks of prompts beside the slots; 0 where there are none.
    """

    width: int = 1
    steps: int = 1
    rows: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What one sequence does in an iteration.

    Args:
        name: of its request. attempt: tells it from the same request before it was preempted.
        slot: its own as long as it runs.
        start: position of the first token. num_tokens: how many are computed.
        tokens: these; empty where it is the one that this slot generated last and the host does not know yet.
        pages: of the sequence, with room for all tokens of the run.
        samples: whether the logits after the last token are wanted; in a chunk that is not a prompt's last they are not.
    """

    name: str
    attempt: int
    slot: int
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    samples: bool = True


@dataclass(frozen=True, slots=True)
class Iteration:
    """One call of one program.

    Args:
        copies: of pages, before all else; at most one a run, so never more than slots.
        decodes: one for each slot that generates. chunks: at most `shape.rows`.
    """

    shape: Shape
    copies: tuple[Copy, ...]
    decodes: tuple[Run, ...]
    chunks: tuple[Run, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.decodes + self.chunks


@dataclass(frozen=True, slots=True)
class Result:
    """What came out of a run.

    Args:
        tokens: generated: `shape.steps` of them; of proposals those accepted and one more; none where it does not sample.
        ended: why the request is to end, in a word, where that is not the scheduler's to see: a stop string, logits
            that are no numbers.
    """

    tokens: tuple[int, ...] = ()
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request has got: tokens, and, at its end, why it ended: "stop", "length", or what `Result.ended` said."""

    name: str
    tokens: tuple[int, ...] = ()
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How a scheduler cuts its work.

    Args:
        num_slots: sequences that run at once.
        max_length: tokens of the longest sequence, prompt and all.
        chunks: rows and length of each shape that chunks of prompts may have.
        steps: tokens that are generated in one call while nothing waits.
        num_proposals: tokens that are proposed and verified at once; 0 where none are.
    """

    num_slots: int = 16
    max_length: int = 4096
    chunks: tuple[tuple[int, int], ...] = field(default=((4, 64), (1, 256)))
    steps: int = 8
    num_proposals: int = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All that there are: the programs to compile."""
        shapes = [Shape(), Shape(steps=self.steps), *(Shape(rows=r, length=n) for r, n in self.chunks)]
        if self.num_proposals:
            shapes.append(Shape(width=1 + self.num_proposals))
        return tuple(dict.fromkeys(shapes))
