"""Guesses of the next tokens, and whether guessing pays.

In: the tokens so far; how many proposals were accepted. Out: `Proposer`, of which `NGram` is one; `Payoff`. Nothing here
needs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Asked(NamedTuple):
    """A sequence whose next tokens are to be guessed.

    Args:
        slot: its own as long as it runs; whose it was before, nobody says but the tokens.
        tokens: prompt and generated; not to be changed, nor kept.
        most: guesses that are wanted, at most; at least 1.
    """

    slot: int
    tokens: list[int]
    most: int


class Proposer(Protocol):
    """Whoever guesses."""

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        """What may follow each of the sequences; nothing where there is no guess."""
        ...


@dataclass(frozen=True, slots=True)
class NGram:
    """What followed the last tokens when they stood there before: the longest such end, where it stood last.

    Args:
        longest, shortest: of the ends that are looked for.
        within: so many of the last tokens are searched, which bounds the time it takes.
    """

    longest: int = 4
    shortest: int = 2
    within: int = 2048

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        """As `Proposer` says."""
        return [self._after(each.tokens[-self.within :], each.most) for each in asked]

    def _after(self, tokens: list[int], most: int) -> list[int]:
        for length in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            end = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start] == end[0] and tokens[start : start + length] == end:
                    return tokens[start + length : start + length + most]
        return []


@dataclass(slots=True)
class Payoff:
    """Whether to propose: as long as a verified step gives more tokens than plain steps would in the same time.

    Switched off, it is tried again after a while, each time after twice as long while it fails.

    Args:
        cost: seconds of a verified step over those of a plain one, as measured.
        weight: of what came last in the running mean of tokens per step.
        patience: verified steps before a verdict, and plain steps before the first new trial.
        longest_wait: plain steps before any new trial, at most.
    """

    cost: float
    weight: float = 0.1
    patience: int = 16
    longest_wait: int = 4096
    _mean: float = field(default=0.0, init=False)
    _seen: int = field(default=0, init=False)
    _rest: int = field(default=0, init=False)
    _wait: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._wait = self.patience

    @property
    def is_on(self) -> bool:
        return self._rest == 0

    @property
    def tokens_per_step(self) -> float:
        """Of a slot in a verified step, lately; 0 before the first."""
        return self._mean

    def verified(self, num_tokens: int, num_slots: int) -> None:
        """A verified step gave tokens to slots."""
        self._seen += 1
        weight = max(self.weight, 1 / self._seen)  # the plain mean at first
        self._mean += weight * (num_tokens / num_slots - self._mean)
        if self._seen < self.patience:
            return
        if self._mean < self.cost:
            self._rest, self._seen = self._wait, 0
            self._wait = min(2 * self._wait, self.longest_wait)
        else:
            self._wait = self.patience

    def plain(self, num_steps: int = 1) -> None:
        """Plain steps were made."""
        self._rest = max(0, self._rest - num_steps)
