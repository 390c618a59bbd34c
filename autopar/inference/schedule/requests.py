"""Define the scheduler's inputs and outputs: requests, iterations, results, options.

In and out: plain values, without a model or a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.inference.kv_cache.page_tables import Copy


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    Args:
        name: an identifier, unique among the requests that have not ended.
        prompt: the tokens of the prompt, at least one.
        max_tokens: the largest number of tokens to generate.
        stop_tokens: tokens that end the request when they are generated.
        priority: requests with a lower number are admitted first and preempted last; those with equal ones in the order of
            arrival.
        is_constrained: whether the host decides by all earlier tokens which one may come next. Then a call has one step.
        scored_from: the position of the first token of the prompt whose logprob is wanted; None if none is. The tokens before it
            may come from the cache, but not their last one.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    priority: int = 0
    is_constrained: bool = False
    scored_from: int | None = None

    @property
    def num_shareable(self) -> int:
        """The number of the prompt's tokens that may come from the cache."""
        most = len(self.prompt) - 1
        return most if self.scored_from is None else min(most, self.scored_from - 1)


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


class Started(NamedTuple):
    """A request that has been admitted to a slot.

    Args:
        num_shared: the number of its tokens whose pages it shares, so that they are not computed.
    """

    slot: int
    name: str
    num_shared: int


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
        next_token: the token after the last one, if the logprobs of the next tokens are wanted; else -1.
    """

    name: str
    attempt: int
    slot: int
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    samples: bool = True
    next_token: int = -1


class Decodes(NamedTuple):
    """The slots that decode in an iteration, as arrays with one entry for each of them.

    Args:
        slots: int32 `[n]`. attempts: int32 `[n]`, as in `Run`.
        starts: int32 `[n]`, the position of the first token.
        num_tokens: int32 `[n]`, the number of tokens computed: decode steps, or the last token and draft tokens.
        tokens: int32 `[n, width]`, the known tokens, padded with 0; -1 for a last token that is on the device alone.
        names: the names of the requests.
    """

    slots: NDArray[np.int32]
    attempts: NDArray[np.int32]
    starts: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    tokens: NDArray[np.int32]
    names: list[str]


@dataclass(frozen=True, slots=True)
class Iteration:
    """One call of one program.

    Args:
        copies: page copies to do first; at most one per sequence, so never more than slots.
        started: the requests that were admitted since the last iteration.
        decodes: the slots that decode.
        chunks: the prefill chunks, at most `shape.rows`. Those of one sequence are consecutive, and the last one samples if
            it ends the prompt.
        tables: int32 `[slots, pages of a sequence]`, the pages of all slots, padded with the scratch page. The scheduler
            changes this array in its next call.
    """

    shape: Shape
    copies: tuple[Copy, ...]
    started: tuple[Started, ...]
    decodes: Decodes
    chunks: tuple[Run, ...]
    tables: NDArray[np.int32]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The decodes and the chunks as objects, for inspection; read it before the scheduler's next call."""
        runs: list[Run] = []
        for name, slot, attempt, start, num, tokens in zip(
            self.decodes.names, *(each.tolist() for each in self.decodes[:5]), strict=True
        ):
            known = () if tokens[0] < 0 else tuple(tokens[: num if self.shape.width > 1 else 1])
            runs.append(Run(name, attempt, slot, start, num, known, tuple(self.tables[slot].tolist())))
        return (*runs, *self.chunks)


class Results(NamedTuple):
    """The results of an iteration, with one row for each slot and then one for each chunk.

    Args:
        tokens: int32 `[rows, steps]`, or `[rows, width]` after verification: the generated tokens.
        num: int32 `[rows]`, after verification the number of accepted draft tokens and one more. Not read otherwise.
        is_sound: bool `[rows]`; False ends the request, because its logits were NaN or infinite.
    """

    tokens: NDArray[np.int32]
    num: NDArray[np.int32]
    is_sound: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Progress:
    """The new tokens of a request, and the reason if it has ended: "stop", "length", or "unsound"."""

    name: str
    tokens: tuple[int, ...] = ()
    ended: str | None = None


class Update(NamedTuple):
    """What the results of an iteration have changed, with one entry for each request that has new tokens or has ended.

    Args:
        slots: int32 `[n]`. rows: int32 `[n]`, the row of each in the results.
        tokens: int32 `[n, steps or width]`, of which the first `num_new` are new. num_new: int32 `[n]`.
        names: the names of the requests.
        ended: the reason of the end, by slot. Another request may be admitted to the slot from now on.
    """

    slots: NDArray[np.int32]
    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    num_new: NDArray[np.int32]
    names: list[str]
    ended: dict[int, str]

    def progress(self) -> list[Progress]:
        """The same as objects, one for each request."""
        each = zip(self.names, self.slots.tolist(), self.num_new.tolist(), self.tokens.tolist(), strict=True)
        return [Progress(name, tuple(tokens[:num]), self.ended.get(slot)) for name, slot, num, tokens in each]


@dataclass(frozen=True, slots=True)
class Options:
    """The static sizes of a scheduler's iterations.

    Args:
        num_slots: the number of sequences that run at once.
        max_length: the tokens of the longest sequence, prompt and output.
        chunks: (rows, length) of each shape of prefill chunks.
        steps: decode steps in one call while no prompt is being computed.
        num_proposals: draft tokens verified at once in speculative decoding; 0 turns it off.
        samples_apart: whether logits and samples of a decode step may be programs of their own, so that the masks of constraints
            are computed while the devices work.
    """

    num_slots: int = 16
    max_length: int = 4096
    chunks: tuple[tuple[int, int], ...] = field(default=((4, 64), (1, 256)))
    steps: int = 8
    num_proposals: int = 0
    samples_apart: bool = False

    @property
    def num_ahead(self) -> int:
        """The tokens of one sequence that are dispatched before the results of the first of them are known, at most: those of
        three iterations."""
        return 3 * max(self.steps, 1 + self.num_proposals, *(rows * length for rows, length in self.chunks), 1)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of all programs to compile."""
        shapes = [Shape(), Shape(steps=self.steps), *(Shape(rows=r, length=n) for r, n in self.chunks)]
        if self.num_proposals:
            shapes.append(Shape(width=1 + self.num_proposals))
        return tuple(dict.fromkeys(shapes))
