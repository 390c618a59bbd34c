"""One request, as whoever asked for it sees it: text and tokens as they come.

In: tokens as they are generated. Out: `Generation`: iterate over it for pieces, or wait for all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar.errors import InferenceError
from autopar.inference.schedule.requests import Request
from autopar.inference.schedule.stop_strings import TextUntilStop
from autopar.inference.serve.runner import UNSOUND, Told
from autopar.inference.step.sampling import SamplingOptions


@dataclass(frozen=True, slots=True)
class Piece:
    """What came at once.

    Args:
        text: "" without a tokenizer, and while it is not known whether a character or a stop string is complete.
        tokens: new ones. logprobs: of each.
        best: for each the most probable tokens with their logprobs, as many as were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(eq=False)
class Generation:
    """A request under way. Made by `Engine.submit`.

    Args:
        request: as the scheduler knows it. sampling: as asked for. num_best: most probable tokens wanted of each.
        decode: a token to its text, which may be "" until a character is complete; None without a tokenizer.
        advance: makes the engine do its next step; False where there is none.
        drop: tells the engine that nobody wants the rest.

    Attributes:
        text: so far, without the stop string. tokens, logprobs, best: so far.
        ended: why: "stop", "length", "aborted", or "unsound" where the logits were no numbers; None while it is not.
        num_cached: prompt tokens that were not computed, for they were in the cache.
        is_cut: `top_p` asked for more tokens than there are candidates.
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
    is_begun: bool = False
    is_cut: bool = False
    _pieces: deque[Piece] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """Of the request."""
        return self.request.name

    @property
    def stopped_at(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self.stops.stopped_at

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come. Who stops reading aborts the request by closing this; who reads slowly holds up nobody.

        Raises:
            InferenceError: the logits were no numbers.
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
        """Itself, when it has ended.

        Raises:
            InferenceError: the logits were no numbers.
        """
        while self.ended is None:
            self.advance()
        self._check()
        return self

    def abort(self) -> None:
        """End it; what has come stays."""
        if self.ended is None:
            self.drop(self.name)

    def take(self, tokens: Sequence[int], told: Told, ended: str | None) -> None:
        """What the engine has for it."""
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
        piece = Piece(text, tuple(tokens), told.logprobs[:num], told.best[:num])
        self.text += text
        self.tokens += tokens
        self.logprobs += piece.logprobs
        self.best += piece.best
        self.is_cut |= told.is_cut
        self.ended = ended
        if piece.tokens or piece.text:
            self._pieces.append(piece)

    def end(self, why: str) -> None:
        """Nothing more will come."""
        if self.ended is None:
            self.take((), Told(), why)

    def _check(self) -> None:
        if self.ended == UNSOUND:
            raise InferenceError(
                f"request {self.name!r} ended: the model's logits were no numbers (NaN or infinite). Its weights are"
                " damaged, or its dtype is too narrow: serve in float32, or copy the checkpoint again"
            )
