"""Stream the text and tokens of one request to its caller.

In: tokens as they are generated. Out: `Generation`: iterate over it for pieces, or wait for the whole result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar.errors import InferenceError
from autopar.inference.schedule.requests import Request
from autopar.inference.schedule.stop_strings import TextUntilStop
from autopar.inference.serve.runner import UNSOUND, TokenDetails
from autopar.inference.step.sampling import SamplingOptions


@dataclass(frozen=True, slots=True)
class Piece:
    """The new text and tokens of one iteration.

    Args:
        text: the new text; "" without a tokenizer, and while a character or a possible stop string is incomplete.
        tokens: the new tokens. logprobs: their logprobs.
        best: for each token the `num_best` most probable tokens with their logprobs.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(eq=False)
class Generation:
    """The output of a request. Made by `Engine.submit`.

    Args:
        request: the request in the scheduler.
        num_best: the number of most probable tokens to record for each token.
        decode: a function from a token to its text, which is "" until a character is complete; None without a tokenizer.
        advance: the function that runs the engine's next step; it returns False if there is none.
        drop: the function that aborts the request by its name.

    Attributes:
        text: the text so far, without the stop string.
        tokens, logprobs, best: the tokens so far, as in `Piece`.
        ended: the reason of the end: "stop", "length", "aborted", "failed", or "unsound" for NaN or infinite logits; None
            before.
        num_cached: the number of prompt tokens that were found in the cache.
        is_cut: whether `top_p` was cut at the number of candidates.
    """

    request: Request
    sampling: SamplingOptions
    num_best: int
    decode: Callable[[int], str] | None
    advance: Callable[[], bool]
    drop: Callable[[str], None]
    stops: TextUntilStop = field(default_factory=TextUntilStop)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    ended: str | None = None
    num_cached: int = 0
    is_started: bool = False
    is_cut: bool = False
    _pieces: deque[Piece] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """The name of the request."""
        return self.request.name

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
                while self._pieces:
                    yield self._pieces.popleft()
                if self.ended is not None:
                    break
                self.advance()
            self._check()
        finally:
            self.abort()

    def result(self) -> Generation:
        """Wait for the end of the request, and return this object.

        Raises:
            InferenceError: the logits were NaN or infinite.
        """
        while self.ended is None:
            self.advance()
        self._check()
        return self

    def abort(self) -> None:
        """Abort the request. The tokens so far remain."""
        if self.ended is None:
            self.drop(self.name)

    def append(self, tokens: Sequence[int], details: TokenDetails, ended: str | None) -> None:
        """Append new tokens. The engine calls this."""
        text = ""
        for number, token in enumerate(tokens, 1):
            is_stop_token = ended == "stop" and number == len(tokens)
            text += self.stops.add(self.decode(token)) if self.decode is not None and not is_stop_token else ""
            if self.stops.is_stopped:
                tokens, ended = tokens[:number], "stop"
                break
        if ended is not None:
            text += self.stops.end()
        num = len(tokens)
        piece = Piece(text, tuple(tokens), details.logprobs[:num], details.best[:num])
        self.text += text
        self.tokens += tokens
        self.logprobs += piece.logprobs
        self.best += piece.best
        self.is_cut |= details.is_cut
        self.ended = ended
        if piece.tokens or piece.text:
            self._pieces.append(piece)

    def end(self, why: str) -> None:
        """End the request for a reason. The engine calls this."""
        if self.ended is None:
            self.append((), TokenDetails(), why)

    def _check(self) -> None:
        if self.ended == UNSOUND:
            raise InferenceError(
                f"request {self.name!r} ended because the model's logits were NaN or infinite. The weights are damaged, or"
                " their dtype is too narrow: serve in float32, or copy the checkpoint again"
            )
