"""Keep the state of all running sequences in arrays with one entry for each slot.

In: sequences as they start, grow and end. Out: `SlotArrays`, which the scheduler reads and changes for all slots at once. The
cost of a decode step on the host is then that of a few array operations, and hardly grows with the number of slots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MIN_STOP_TOKENS = 4


class SlotArrays:
    """The state of all slots.

    Args:
        num_slots: the number of slots. max_length: the tokens of the longest sequence.
        pages_of_sequence: the number of its pages.
        scratch_page: the page that pads the page tables.

    Attributes:
        attempts: int32, a number that no other sequence had; 0 in an idle slot.
        ranks: int64, the order of admission: priority first, then arrival.
        num_prompt: the number of prompt tokens. num_end: the number of tokens, prompt included, that end the request.
        num_known: the number of tokens that the host knows.
        num_pending: the number of generated tokens that are on the device only.
        num_dispatched: the number of tokens whose computation has been dispatched.
        capacity: the number of tokens that the sequence's own pages have room for.
        num_pages: the number of its pages.
        num_given_back: the number of leading pages behind the window, which it no longer holds.
        num_inserted: the number of tokens from which its next page goes to the prefix cache.
        is_verifying: whether draft tokens are being verified, so the number of new tokens is not yet known.
        is_constrained: as in `Request`.
        tokens: int32 `[slots, max_length]`, the known tokens. tables: int32 `[slots, pages_of_sequence]`.
        stop_tokens: int32 `[slots, n]`, padded with -1.
        names: the names of the requests; "" in an idle slot.
    """

    def __init__(self, num_slots: int, max_length: int, pages_of_sequence: int, scratch_page: int) -> None:
        def zeros() -> NDArray[np.int32]:
            return np.zeros(num_slots, np.int32)

        self.attempts, self.num_prompt, self.num_end = zeros(), zeros(), zeros()
        self.num_known, self.num_pending, self.num_dispatched = zeros(), zeros(), zeros()
        self.capacity, self.num_pages, self.num_inserted = zeros(), zeros(), zeros()
        self.num_given_back = zeros()
        self.ranks = np.zeros(num_slots, np.int64)
        self.is_verifying, self.is_constrained = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
        self.tokens = np.zeros((num_slots, max_length), np.int32)
        self.tables = np.full((num_slots, pages_of_sequence), scratch_page, np.int32)
        self.stop_tokens = np.full((num_slots, _MIN_STOP_TOKENS), -1, np.int32)
        self.names = [""] * num_slots
        self.scratch_page = scratch_page

    @property
    def num_to_compute(self) -> NDArray[np.int32]:
        """The number of tokens to compute before the next one can be sampled; 0 in an idle slot."""
        return self.num_known + self.num_pending - self.num_dispatched

    @property
    def num_to_generate(self) -> NDArray[np.int32]:
        return self.num_end - self.num_known - self.num_pending

    def can_decode(self) -> NDArray[np.bool_]:
        """Whether the next token of each slot can be computed."""
        return (self.num_to_compute == 1) & (self.num_to_generate > 0) & ~self.is_verifying

    def history(self, slot: int) -> NDArray[np.int32]:
        """The known tokens of a slot: a view."""
        return self.tokens[slot, : self.num_known[slot]]

    def oldest_first(self, slots: NDArray[np.intp]) -> list[int]:
        """The slots in the order of admission."""
        return slots[np.argsort(self.ranks[slots])].tolist() if slots.size > 1 else slots.tolist()

    def occupy(self, slot: int, name: str, attempt: int, rank: int, tokens: ArrayLike) -> None:
        """Start a sequence in an idle slot, without pages. The caller sets `num_prompt` and `num_end`."""
        known = np.asarray(tokens, np.int32)
        self.names[slot], self.attempts[slot], self.ranks[slot] = name, attempt, rank
        self.tokens[slot, : known.size], self.num_known[slot] = known, known.size
        self.num_pending[slot] = self.num_dispatched[slot] = self.num_inserted[slot] = 0
        self.is_verifying[slot] = False

    def set_stop_tokens(self, slot: int, tokens: frozenset[int]) -> None:
        """Set the tokens that end a slot's request."""
        more = len(tokens) - self.stop_tokens.shape[1]
        if more > 0:
            self.stop_tokens = np.pad(self.stop_tokens, ((0, 0), (0, more)), constant_values=-1)
        self.stop_tokens[slot] = -1
        self.stop_tokens[slot, : len(tokens)] = list(tokens)

    def set_pages(self, slot: int, pages: list[int], first: int = 0) -> None:
        """Set the pages of a slot from the page numbered `first`. Those that it does not hold are the scratch page."""
        self.tables[slot, first : len(pages)] = [self.scratch_page if page < 0 else page for page in pages[first:]]
        self.tables[slot, len(pages) : self.num_pages[slot]] = self.scratch_page
        self.num_pages[slot] = len(pages)

    def clear(self, slot: int) -> None:
        """Make a slot idle."""
        self.set_pages(slot, [])
        for array in (
            self.attempts,
            self.num_known,
            self.num_pending,
            self.num_dispatched,
            self.num_end,
            self.capacity,
            self.num_given_back,
        ):
            array[slot] = 0
        self.names[slot], self.is_verifying[slot], self.is_constrained[slot] = "", False, False
