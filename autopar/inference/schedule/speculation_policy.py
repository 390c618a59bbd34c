"""Propose draft tokens for speculative decoding by n-gram lookup, and decide when speculation pays.

In: the tokens so far; the number of tokens that verified steps gave. Out: `Proposer`, the interface of draft token sources,
and `NGram`, the one without a model; `SpeculationPolicy`, which turns speculation on and off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray


class DraftRequest(NamedTuple):
    """A sequence to propose draft tokens for.

    Args:
        slot: the sequence's slot. Another sequence may have had it before, which only the tokens show.
        tokens: int32 `[n]`, the prompt and the generated tokens. The proposer must not change or keep the array.
        max_tokens: the largest number of draft tokens, at least 1.
    """

    slot: int
    tokens: ArrayLike
    max_tokens: int


class Proposer(Protocol):
    """A source of draft tokens."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """Return draft tokens for each sequence; none where there is no proposal."""
        ...


@dataclass(frozen=True, slots=True)
class NGram:
    """Propose the tokens that followed the latest earlier occurrence of the sequence's last n tokens.

    The longest n with an earlier occurrence is used.

    Args:
        longest, shortest: the range of n.
        within: the number of last tokens to search, which bounds the time.
    """

    longest: int = 4
    shortest: int = 2
    within: int = 2048

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """See `Proposer`."""
        return [self._look_up(np.asarray(each.tokens)[-self.within :], each.max_tokens) for each in requests]

    def _look_up(self, tokens: np.ndarray, max_tokens: int) -> list[int]:
        for length in range(min(self.longest, tokens.size - 1), self.shortest - 1, -1):
            num = tokens.size - length  # the occurrences before the last one
            is_found = np.ones(num, bool)
            for offset, token in enumerate(tokens[-length:]):
                is_found &= tokens[offset : offset + num] == token
            found = np.flatnonzero(is_found)
            if found.size:
                start = int(found[-1]) + length
                return tokens[start : start + max_tokens].tolist()
        return []


@dataclass(slots=True)
class SpeculationPolicy:
    """Enable speculative decoding while a verified step gives more tokens than plain decode steps in the same time.

    While it is disabled, it is tried again after `patience` plain steps, and after twice as many each time it fails.

    Args:
        cost: the measured seconds of a verified step, draft included, over those of a plain step.
        weight: the weight of the newest step in the moving average of tokens per step.
        patience: verified steps before a decision, and plain steps before the first new trial.
        max_wait: the largest number of plain steps before a new trial.
    """

    cost: float
    weight: float = 0.1
    patience: int = 16
    max_wait: int = 4096
    _mean: float = field(default=0.0, init=False)
    _num_verified: int = field(default=0, init=False)
    _steps_disabled: int = field(default=0, init=False)
    _wait: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._wait = self.patience

    @property
    def is_enabled(self) -> bool:
        return self._steps_disabled == 0

    @property
    def tokens_per_step(self) -> float:
        """The moving average of tokens per slot in a verified step; 0 before the first."""
        return self._mean

    def record_verified(self, num_tokens: int, num_slots: int) -> None:
        """Record a verified step that gave `num_tokens` tokens to `num_slots` slots."""
        self._num_verified += 1
        weight = max(self.weight, 1 / self._num_verified)  # the arithmetic mean at first
        self._mean += weight * (num_tokens / num_slots - self._mean)
        if self._num_verified < self.patience:
            return
        if self._mean < self.cost:
            self._steps_disabled, self._num_verified = self._wait, 0
            self._wait = min(2 * self._wait, self.max_wait)
        else:
            self._wait = self.patience

    def record_plain(self, num_steps: int = 1) -> None:
        """Record plain decode steps."""
        self._steps_disabled = max(0, self._steps_disabled - num_steps)

    def record(self, num_steps: int, counts: NDArray[np.int32] | None) -> None:
        """Record an iteration.

        Args:
            counts: the number of tokens of each slot after verification; None if nothing was verified.
        """
        if counts is None:
            self.record_plain(num_steps)
        else:
            self.record_verified(int(counts.sum()), counts.size)
