"""Stream the text and tokens of one request to its caller.

In: tokens as they are generated. Out: `Generation`: iterate over it for pieces, or wait for the whole result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InferenceError
from autopar.inference.schedule.requests import Request
from autopar.inference.schedule.stop_strings import TextUntilStop
from autopar.inference.schedule.take_results import UNSOUND
from autopar.inference.serve.token_masks import Constraint
from autopar.inference.step.prompt_logprobs import PromptLogprobs
from autopar.inference.step.sampling_params import SamplingOptions


@dataclass(frozen=True, slots=True)
class Piece:
    """The new text and tokens since the last piece.

    Args:
        text: the new text; "" without a tokenizer, and while a character or a possible stop string is incomplete.
        tokens: the new tokens. logprobs: their logprobs.
        best: for each token the `num_best` most probable tokens with their logprobs.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...] = ()


class Source(Protocol):
    """The engine of a generation."""

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """The lock that is held while generations change."""
        ...

    def step(self) -> bool:
        """Run the next step; False if there is none."""
        ...

    def collect(self, generation: Generation) -> None:
        """Pass new tokens to a generation."""
        ...

    def abort(self, name: str) -> None:
        """Abort a request."""
        ...

    def check_awake(self) -> None:
        """Raise an `InferenceError` if requests wait until somebody wakes the engine up."""
        ...


@dataclass(eq=False)
class Generation:
    """The output of a request. Made by `Engine.submit`.

    Tokens are passed to it in windows, and text is decoded from them, when it is read: `tokens`, `text` and the pieces are up to
    date, and a generation that nobody reads costs the engine next to nothing.

    Args:
        request: the request in the scheduler.
        num_best: the number of most probable tokens to record for each token.
        decode: a function from a token to its text, which is "" until a character is complete; None without a tokenizer.
        source: the engine.
        stops: the strings that end the text. constraint: decides which tokens may follow; None allows all.
        wants_state: whether to keep the hidden state after the prompt.

    Attributes:
        best: for each token the most probable ones, as in `Piece`.
        ended: the reason of the end: "stop", "length", "aborted", "failed", or "unsound" for NaN or infinite logits; None
            before.
        num_cached: the number of prompt tokens that were found in the cache.
        slot: the slot that the engine collects its tokens from; None before the start and after the end.
        state: f32 `[hidden]`, the last hidden state of the prompt's last token; None if it is not wanted.
        prompt_scores: for each scored token of the prompt its logprob, and the most probable token in its place with its logprob.
    """

    request: Request
    sampling: SamplingOptions
    num_best: int
    decode: Callable[[int], str] | None
    source: Source
    stops: TextUntilStop = field(default_factory=TextUntilStop)
    constraint: Constraint | None = None
    wants_state: bool = False
    state: NDArray[np.float32] | None = None
    prompt_scores: dict[int, tuple[float, int, float]] = field(default_factory=dict)
    best: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    ended: str | None = None
    num_cached: int = 0
    is_started: bool = False
    slot: int | None = None
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _text: str = ""
    _num_decoded: int = 0  # tokens whose text is in `_text` or withheld
    _has_whole_text: bool = False
    _weights: list[tuple[int, int]] = field(default_factory=list)  # the number of tokens before, and the version
    _num_read: tuple[int, int] = (0, 0)  # tokens and characters in pieces so far

    @property
    def name(self) -> str:
        """The name of the request."""
        return self.request.name

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        self._collect()
        return self._tokens

    @property
    def logprobs(self) -> list[float]:
        """The logprob of each token so far."""
        self._collect()
        return self._logprobs

    @property
    def text(self) -> str:
        """The text so far, without the stop string; "" without a tokenizer."""
        with self.source.lock:
            self._collect()
            self._decode_new()
            return self._text

    @property
    def stopped_at(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self.stops.stopped_at

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    def __iter__(self) -> Iterator[Piece]:
        """Iterate over pieces as they are generated. Closing the iterator aborts the request. A slow reader blocks no request.

        Raises:
            InferenceError: the logits were NaN or infinite.
        """
        try:
            while True:
                ended = self.ended
                if (piece := self._new_piece()) is not None:
                    yield piece
                elif ended is not None:
                    break
                else:
                    self._wait()
            self._check()
        finally:
            self.abort()

    def result(self) -> Generation:
        """Wait for the end of the request, and return this object.

        Raises:
            InferenceError: the logits were NaN or infinite.
        """
        while self.ended is None:
            self._wait()
        self._check()
        return self

    def abort(self) -> None:
        """Abort the request. The tokens so far remain."""
        if self.ended is None:
            self.source.abort(self.name)

    @property
    def versions(self) -> list[int]:
        """For each token so far, the version of the weights that it was computed with (`Engine.weights_version`)."""
        found: list[int] = []
        for start, version in reversed(self._weights):
            found = [version] * max(0, len(self.tokens) - len(found) - start) + found
        return found

    def note_weights(self, version: int) -> None:
        """Record the weights that the next tokens are computed with. The engine calls this, with no token in flight."""
        self._weights.append((len(self.tokens), version))

    def start(self, num_cached: int) -> int:
        """Record the number of prompt tokens found in the cache, and return it; 0 after a preemption. The engine calls this."""
        if self.is_started:
            return 0
        self.is_started, self.num_cached = True, num_cached
        return num_cached

    def score_prompt(self, start: int, prompt: PromptLogprobs | None, row: int) -> None:
        """Record the logprobs of the tokens after those of a chunk that starts at a position. The engine calls this."""
        first = max(self.request.scored_from or 1, start + 1)
        chosen, tokens, best = (np.asarray(each)[row].tolist() for each in prompt or ())
        for at in range(first, min(start + 1 + len(chosen), len(self.request.prompt))):
            number = at - start - 1
            self.prompt_scores[at] = chosen[number], tokens[number], best[number]

    def append(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append new tokens. The engine calls this."""
        self._tokens += tokens
        self._logprobs += logprobs

    def stops_early(self) -> bool:
        """Whether the text has come to a stop string. Then tokens after it are dropped. The engine calls this."""
        self._decode_new()
        if not self.stops.is_stopped:
            return False
        for each in (self._tokens, self._logprobs, self.best):
            del each[self._num_decoded :]
        self.ended = "stop"
        return True

    def _wait(self) -> None:
        """Step the engine. If it sleeps, the request would wait forever."""
        if not self.source.step() and self.ended is None:
            self.source.check_awake()

    def _collect(self) -> None:
        if self.slot is not None:
            with self.source.lock:
                self.source.collect(self)

    def _decode_new(self) -> None:
        """Decode tokens up to a stop string."""
        while self._num_decoded < len(self._tokens) and not self.stops.is_stopped:
            token = self._tokens[self._num_decoded]
            self._num_decoded += 1
            is_last = self.ended == "stop" and self._num_decoded == len(self._tokens)  # a stop token has no text
            if self.decode is not None and not is_last:
                self._text += self.stops.add(self.decode(token))
        if self.ended is not None and not self._has_whole_text:
            self._text += self.stops.end()
            self._has_whole_text = True

    def _new_piece(self) -> Piece | None:
        with self.source.lock:
            text, tokens = self.text, self._tokens
            start, start_text = self._num_read
            if (len(tokens), len(text)) == self._num_read:
                return None
            self._num_read = len(tokens), len(text)
            return Piece(
                text[start_text:], tuple(tokens[start:]), tuple(self._logprobs[start:]), tuple(self.best[start:])
            )

    def _check(self) -> None:
        if self.ended == UNSOUND:
            raise InferenceError(
                f"request {self.name!r} ended because the model's logits were NaN or infinite. The weights are damaged, or"
                " their dtype is too narrow: serve in float32, or copy the checkpoint again"
            )
