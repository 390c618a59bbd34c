"""Let the host decide which tokens may come next: a mask for each slot with a constraint.

In: constraints, such as the state of a grammar, and the tokens that were generated. Out: `TokenMasks`, the mask of an iteration, one
more input of its program. So no constraint compiles anything.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.inference.schedule.requests import Iteration, Update


class Constraint(Protocol):
    """Decides which tokens may follow those of a request. It is used in the thread that steps the engine."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the mask of the next token: a bit for each, the lowest bit of a word first."""
        ...

    def accept(self, tokens: list[int]) -> None:
        """Take note of generated tokens."""
        ...


class TokenMasks:
    """The masks of all slots.

    Args:
        num_slots: the number of slots. words: the number of int32 words of a mask.
    """

    def __init__(self, num_slots: int, words: int) -> None:
        self._masks = np.full((num_slots, words), -1, np.int32)
        self._constraints: dict[int, Constraint] = {}

    def assign(self, slot: int, constraint: Constraint | None) -> None:
        """Set the constraint of a slot, until another request starts in it."""
        self._masks[slot] = -1
        self._constraints.pop(slot, None)
        if constraint is not None:
            self._constraints[slot] = constraint
            constraint.fill(self._masks[slot])

    def take(self, update: Update) -> None:
        """Pass new tokens to the constraints, and compute the next masks. A request that has ended needs none."""
        if not self._constraints:
            return
        for slot, num, tokens in zip(
            update.slots.tolist(), update.num_new.tolist(), update.tokens.tolist(), strict=True
        ):
            constraint = self._constraints.get(slot)
            if slot in update.ended:
                self.assign(slot, None)
            elif constraint is not None:
                constraint.accept(tokens[:num])
                constraint.fill(self._masks[slot])

    def of(self, iteration: Iteration) -> NDArray[np.int32] | None:
        """The masks of the iteration's rows; None if none of them has a constraint."""
        slots = iteration.decodes.slots
        chunks = [run.slot for run in iteration.chunks]
        if not self._constraints or not self._constraints.keys() & {*slots.tolist(), *chunks}:
            return None
        rows = np.full((len(self._masks) + iteration.shape.rows, self._masks.shape[1]), -1, np.int32)
        rows[slots] = self._masks[slots]
        rows[len(self._masks) : len(self._masks) + len(chunks)] = self._masks[chunks]
        return rows
