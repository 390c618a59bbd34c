"""Let the host decide which tokens may come next: a mask for each slot with a constraint.

In: constraints, such as the state of a grammar, and the tokens that were generated. Out: `TokenMasks`, the mask of an iteration, one
more input of its program. So no constraint compiles anything. `AllowedDrafts` proposes only draft tokens that may follow, and those
that must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.inference.schedule.requests import Iteration, Update
from autopar.inference.schedule.speculation_policy import DraftRequest, Proposer


class Constraint(Protocol):
    """Decides which tokens may follow those of a request. It is used in the thread that steps the engine."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the mask of the next token: a bit for each, the lowest bit of a word first."""
        ...

    def fill_after(self, draft: Sequence[int], masks: NDArray[np.int32]) -> None:
        """Write the masks after each draft token, as far as they are allowed, to `masks` `[drafts, words]`."""
        ...

    def num_allowed(self, draft: Sequence[int]) -> int:
        """How many of the draft tokens may follow, one after the other."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as they are known; none if there is a choice."""
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
        self._is_constrained = np.zeros(num_slots, bool)

    def assign(self, slot: int, constraint: Constraint | None) -> None:
        """Set the constraint of a slot, until another request starts in it."""
        self._masks[slot] = -1
        self._constraints.pop(slot, None)
        self._is_constrained[slot] = constraint is not None
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
            elif constraint is not None and num:
                constraint.accept(tokens[:num])
                constraint.fill(self._masks[slot])

    def needs_results(self, iteration: Iteration) -> bool:
        """Whether a mask depends on a token that is on the devices only."""
        decodes = iteration.decodes
        return bool((self._is_constrained[decodes.slots] & (decodes.tokens[:, 0] < 0)).any())

    def of(self, iteration: Iteration) -> NDArray[np.int32] | None:
        """The masks of the iteration's rows; None if none of them has a constraint.

        Returns:
            `[slots + chunks, words]`, or `[slots, width, words]` if draft tokens are verified.
        """
        decodes, shape = iteration.decodes, iteration.shape
        chunks = [run.slot for run in iteration.chunks]
        if not self._is_constrained[decodes.slots].any() and not self._is_constrained[chunks].any():
            return None
        num, words = self._masks.shape
        if shape.width == 1:
            rows = np.full((num + shape.rows, words), -1, np.int32)
            rows[decodes.slots] = self._masks[decodes.slots]
            rows[num : num + len(chunks)] = self._masks[chunks]
            return rows
        drafts = np.full((num, shape.width, words), -1, np.int32)
        drafts[decodes.slots, 0] = self._masks[decodes.slots]
        for slot, count, tokens in zip(
            decodes.slots.tolist(), decodes.num_tokens.tolist(), decodes.tokens.tolist(), strict=True
        ):
            if count > 1 and slot in self._constraints:
                self._constraints[slot].fill_after(tokens[1:count], drafts[slot, 1:])
        return drafts

    def allowed_draft(self, request: DraftRequest, draft: Sequence[int]) -> Sequence[int]:
        """The draft tokens of a slot that may follow; those that must follow, if the draft has others."""
        constraint = self._constraints.get(request.slot)
        if constraint is None:
            return draft
        forced = constraint.forced()[: request.max_tokens]
        if list(draft[: len(forced)]) != forced:
            return forced
        return draft[: constraint.num_allowed(draft)]


class AllowedDrafts:
    """A source of draft tokens that proposes only those that constraints allow (`Proposer`).

    Args:
        proposer: the source. masks: those of the engine.
    """

    def __init__(self, proposer: Proposer, masks: TokenMasks) -> None:
        self._proposer, self._masks = proposer, masks

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """See `Proposer`."""
        drafts = self._proposer.propose(requests)
        return [self._masks.allowed_draft(*each) for each in zip(requests, drafts, strict=True)]
