"""Define the scheduler's inputs and outputs: requests, iterations, results, options.

In and out: plain values, without a model or a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.inference.kv_cache.page_tables import Copy


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    Args:
        name: an identifier, unique among the requests that have not ended.
        prompt: the tokens of the prompt, at least one.
        max_tokens: the largest number of tokens to generate.
        stop_tokens: tokens that end the request when they are generated.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()


class Shape(NamedTuple):
    """The static sizes of an iteration. Each shape is one compiled program; the number of slots is the same in all.

    Args:
        width: tokens per slot: 1, or more if draft tokens are verified.
        steps: decode steps in one call.
        rows, length: the number and the length of prefill chunks in the iteration; 0 if there are none.
    """

    width: int = 1
    steps: int = 1
    rows: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """The work of one sequence in an iteration.

    Args:
        name: the request's name.
        attempt: a number that changes when the request is preempted and starts again.
        slot: the sequence's slot, which it keeps as long as it runs.
        start: the position of the first token. num_tokens: the number of tokens computed.
        tokens: the tokens; empty if the only one is the last token of the slot, which is on the device alone.
        pages: the sequence's pages, with room for all tokens of the run.
        samples: whether a token is sampled after the last one; False for all but the last chunk of a prompt.
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
        copies: page copies to do first; at most one per run, so never more than slots.
        decodes: one run for each slot that decodes.
        chunks: the prefill chunks, at most `shape.rows`.
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
    """The result of a run.

    Args:
        tokens: the generated tokens: `shape.steps` of them; after verification, the accepted draft tokens and one more;
            none if the run does not sample.
        ended: a reason to end the request that the scheduler cannot know, such as non-finite logits.
    """

    tokens: tuple[int, ...] = ()
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The new tokens of a request, and the reason if it has ended: "stop", "length", or that of `Result.ended`."""

    name: str
    tokens: tuple[int, ...] = ()
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The static sizes of a scheduler's iterations.

    Args:
        num_slots: the number of sequences that run at once.
        max_length: the tokens of the longest sequence, prompt and output.
        chunks: (rows, length) of each shape of prefill chunks.
        steps: decode steps in one call while no request waits.
        num_proposals: draft tokens verified at once in speculative decoding; 0 turns it off.
    """

    num_slots: int = 16
    max_length: int = 4096
    chunks: tuple[tuple[int, int], ...] = field(default=((4, 64), (1, 256)))
    steps: int = 8
    num_proposals: int = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of all programs to compile."""
        shapes = [Shape(), Shape(steps=self.steps), *(Shape(rows=r, length=n) for r, n in self.chunks)]
        if self.num_proposals:
            shapes.append(Shape(width=1 + self.num_proposals))
        return tuple(dict.fromkeys(shapes))
