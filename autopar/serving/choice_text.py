"""Turn the tokens of one choice into text, up to a stop string.

In: new tokens. Out: `ChoiceText`, and a `Delta` for each batch of tokens. This runs in the event loop, not in the engine's thread, so
a request goes on for a step or two after its stop string; these tokens are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from autopar.inference import Generation
from autopar.inference.model.tokenizer import text_stream
from autopar.inference.schedule.stop_strings import TextUntilStop
from autopar.serving.engine_thread import NewTokens


class TokenLogprob(NamedTuple):
    """A token with its logprob, and the most probable tokens in its place. The first token of a prompt has no logprob."""

    token: int
    logprob: float | None
    best: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """What new tokens add to a choice.

    Args:
        finish: the reason of the end in OpenAI's words: "stop" or "length"; None before.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish: str | None


@dataclass(eq=False)
class ChoiceText:
    """One choice of a reply.

    Args:
        generation: of the engine. Only its `best` is read here, which the engine's thread appends to.
        decode: a function from a token to its text; None without a tokenizer.
        stops: the strings that end the text.
        needs_logprobs: whether to keep logprobs.

    Attributes:
        text: the text so far. num_tokens: the number of tokens so far.
    """

    generation: Generation
    decode: Callable[[int], str] | None
    stops: TextUntilStop
    needs_logprobs: bool
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None

    @classmethod
    def of(cls, generation: Generation, tokenizer: Any, stop: tuple[str, ...], *, needs_logprobs: bool) -> ChoiceText:
        """A choice without text."""
        decode = None if tokenizer is None else text_stream(tokenizer)
        return cls(generation, decode, TextUntilStop(stop), needs_logprobs)

    def add(self, new: NewTokens) -> Delta:
        """Add new tokens, in the order in which they were generated."""
        text, num, ended = "", len(new.tokens), new.ended
        for number, token in enumerate(new.tokens, 1):
            if self.decode is not None and not (ended == "stop" and number == num):  # a stop token has no text
                text += self.stops.add(self.decode(token))
            if self.stops.is_stopped:
                num, ended = number, "stop"
                break
        if ended is not None:
            text += self.stops.end()
            self.finish = ended
        tokens, first = new.tokens[:num], len(self.tokens)
        logprobs: list[TokenLogprob] = []
        if self.needs_logprobs:
            best = self.generation.best[first : first + num]
            best = [tuple(each for each in one if each[1] > -math.inf) for one in best]  # those of a mask
            best += [()] * (num - len(best))
            logprobs = [TokenLogprob(*each) for each in zip(tokens, new.logprobs[:num], best, strict=True)]
            self.logprobs += logprobs
        self.text += text
        self.tokens += tokens
        return Delta(text, tokens, logprobs, ended)


@lru_cache(maxsize=1)
def _bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token alone, which may be a part of a character."""
    piece = tokenizer.id_to_token(token)
    if piece is None:
        return b""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    letters = _bytes_of_letters()
    if type(tokenizer.decoder).__name__ == "ByteLevel" and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return tokenizer.decode([token], skip_special_tokens=False).encode()
