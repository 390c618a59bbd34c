"""Admit requests to slots and pages, and preempt them where pages run out.

In: requests, a `PagedCache`. Out: `Admission`: the requests that wait, and the `SlotArrays` and page tables of those that run.

- Prefix sharing: a request is forked from a running sequence that has dispatched all of its tokens but the last, and
  decodes at once. A request whose prefix is being computed waits for it.
- Admission: by priority, then in the order of arrival. A request is admitted when pages are available for its whole prompt,
  besides those that running sequences need for their prompts and one more for each. Pages are allocated when they are needed.
- Preemption: when no page is available for the next token, the last sequence in that order releases its pages and waits to be
  recomputed. The first one always progresses, so every request ends.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.inference.kv_cache.page_tables import Copy, PagedCache, PageTable
from autopar.inference.kv_cache.prefix_tree import page_keys
from autopar.inference.kv_cache.running_prefixes import RunningPrefixes, prefix_hashes
from autopar.inference.schedule.requests import Options, Request, Started
from autopar.inference.schedule.slot_arrays import SlotArrays

_ARRIVALS = 1 << 40  # a rank is a priority and an arrival below this number
_MOST_PRIORITY = 1 << 20


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that waits.

    Args:
        rank: its place in the order of admission.
        tokens: the prompt, and the tokens generated before a preemption.
        num_shareable: the number of tokens that may come from the cache: at most all but the last.
        keys: the keys of the full pages of these tokens. hashes: those of their prefixes.
    """

    request: Request
    rank: int
    tokens: NDArray[np.int32]
    num_shareable: int
    keys: list[bytes]
    hashes: list[int]


class Admission:
    """The waiting requests and the running sequences of one model.

    Attributes:
        waiting: in the order of admission.
        slots: the state of running sequences.
        requests, page_tables: the requests and the page tables of running sequences, by slot.
    """

    def __init__(self, cache: PagedCache, options: Options, scratch_page: int) -> None:
        pages_of_sequence = cache.num_pages(options.max_length)
        self.waiting: list[Waiting] = []
        self.slots = SlotArrays(options.num_slots, options.max_length, pages_of_sequence, scratch_page)
        self.requests: dict[int, Request] = {}
        self.page_tables: dict[int, PageTable] = {}
        self.num_preempted = 0
        self._cache, self._options = cache, options
        self._prefixes = RunningPrefixes(options.num_slots)
        self._free = list(range(options.num_slots - 1, -1, -1))
        self._attempts = self._arrivals = 0
        self._slot_of: dict[str, int] = {}

    def add(self, request: Request) -> None:
        """Add a new request to the queue."""
        self._arrivals += 1
        priority = max(-_MOST_PRIORITY, min(_MOST_PRIORITY, request.priority))
        self._queue(request, priority * _ARRIVALS + self._arrivals, np.array(request.prompt, np.int32))

    def _queue(self, request: Request, rank: int, tokens: NDArray[np.int32]) -> None:
        most = tokens.size - 1 if request.scored_from is None else request.num_shareable
        keys = page_keys(tokens[:most], self._cache.page_size) if self._cache.shares_prefixes else []
        waiting = Waiting(request, rank, tokens, most, keys, prefix_hashes(keys))
        bisect.insort(self.waiting, waiting, key=lambda each: each.rank)

    def admit(self) -> list[Started]:
        """Admit waiting requests while a slot and pages are available."""
        started: list[Started] = []
        self._cache.pool.claim(0)
        while self.waiting and self._free:
            waiting = self.waiting[0]
            table = self._start_table(waiting)
            if table is None:
                break
            if not self._has_room(waiting.tokens.size, table):
                self._cache.release(table)
                break
            del self.waiting[0]
            started.append(self._start(waiting, table))
        return started

    def _start(self, waiting: Waiting, table: PageTable) -> Started:
        self._attempts += 1
        request, slots, slot = waiting.request, self.slots, self._free.pop()
        slots.occupy(slot, request.name, self._attempts, waiting.rank, waiting.tokens)
        slots.num_prompt[slot] = len(request.prompt)
        slots.num_end[slot] = len(request.prompt) + request.max_tokens
        slots.set_stop_tokens(slot, request.stop_tokens)
        slots.is_constrained[slot] = request.is_constrained
        slots.set_pages(slot, table.pages)
        slots.num_given_back[slot] = table.num_given_back
        # The last page of a fork is shared, so the next write is checked for a copy.
        slots.num_dispatched[slot] = slots.capacity[slot] = table.num_tokens
        self._prefixes.add(slot, waiting.hashes)
        self.requests[slot], self.page_tables[slot], self._slot_of[request.name] = request, table, slot
        return Started(slot, request.name, table.num_tokens)

    def _start_table(self, waiting: Waiting) -> PageTable | None:
        """Make a table that shares the longest computed prefix, from the prefix cache or by a fork of a running sequence.

        Returns:
            None to wait for a longer prefix: a running sequence has it and has not dispatched all of it yet.
        """
        if not self._cache.shares_prefixes:
            return PageTable([])
        num, sources = self._shareable(waiting)
        if num <= self._cache.num_cached(waiting.keys) * self._cache.page_size:
            return self._cache.start_with(waiting.keys)
        slots = self.slots
        ready = sources[slots.num_dispatched[sources] >= num]
        if not ready.size:
            return None
        source = slots.oldest_first(ready)[0]
        table = self._current_table(source)
        slots.capacity[source] = slots.num_dispatched[source]  # its next write is checked for a copy, too
        return self._cache.fork(table, num)

    def _shareable(self, waiting: Waiting) -> tuple[int, NDArray[np.intp]]:
        """The longest prefix that running sequences have, and their slots: all shareable tokens, or whole pages."""
        slots, tokens, size = self.slots, waiting.tokens, self._cache.page_size
        num_pages, found = self._prefixes.longest(waiting.hashes)
        sources = np.array(found, np.intp) if num_pages else np.flatnonzero(slots.attempts)
        num, most = num_pages * size, waiting.num_shareable
        if num_pages:  # two prefixes may have one hash
            sources = sources[(slots.tokens[sources, :num] == tokens[:num]).all(1)]
        if num_pages == len(waiting.hashes) and sources.size:
            has_rest = (slots.tokens[sources, num:most] == tokens[num:most]).all(1) & (slots.num_known[sources] >= most)
            has_rest &= slots.num_given_back[sources] <= self._cache.first_needed(most)
            if has_rest.any():
                return most, sources[has_rest]
        sources = sources[slots.num_given_back[sources] <= self._cache.first_needed(num)]
        return (num, sources) if sources.size else (0, sources)

    def _has_room(self, num_tokens: int, table: PageTable) -> bool:
        """Whether pages are available for a new sequence, besides those that running sequences reserve."""
        slots, size = self.slots, self._cache.page_size
        # The pages of all tokens of each, a copy if its last page may be shared, and one more.
        own = np.maximum(0, -(-(slots.num_known + slots.num_pending + 1) // size) - slots.num_pages)
        needed = self._cache.num_needed(table, num_tokens + 1)
        if self._cache.window is not None:  # pages behind the window are given back before others are allocated
            most = self.most_held(self.slots.tables.shape[1] * size)
            own = np.minimum(own, np.maximum(0, most - slots.num_pages + slots.num_given_back))
            needed = min(needed, max(0, most - len(table.held)))
        reserved = (own + (slots.capacity < slots.num_pages * size) + 1)[slots.attempts > 0].sum()
        pool, total = self._cache.pool, needed + int(reserved)
        if total <= pool.num_available:
            return True
        pool.claim(total)
        return False

    def most_held(self, num_tokens: int) -> int:
        """The number of pages that a sequence of so many tokens holds at most."""
        return self._cache.most_held(num_tokens, self._options.num_ahead)

    def remove(self, slot: int) -> Request:
        """Release the slot and the pages of a sequence."""
        request = self.requests.pop(slot)
        self._cache.release(self.page_tables.pop(slot))
        self._prefixes.remove(slot)
        self.slots.clear(slot)
        self._free.append(slot)
        del self._slot_of[request.name]
        return request

    def drop(self, name: str) -> None:
        """Remove a request, whether it runs or waits."""
        if name in self._slot_of:
            self.remove(self._slot_of[name])
        else:
            self.waiting = [each for each in self.waiting if each.request.name != name]

    def _preempt_last(self) -> int:
        """Preempt the last sequence in the order of admission, and return its slot."""
        slots = self.slots
        running = np.flatnonzero(slots.attempts)
        slot = int(running[np.argmax(slots.ranks[running])])
        rank, tokens = int(slots.ranks[slot]), slots.history(slot).copy()
        self.num_preempted += 1
        self._queue(self.remove(slot), rank, tokens)
        return slot

    def preempt_all(self) -> None:
        """Preempt all sequences."""
        while self.requests:
            self._preempt_last()

    def grow(self, slot: int, num_tokens: int, copies: list[Copy], *, may_preempt: bool = True) -> bool:
        """Allocate pages for `num_tokens` tokens of a sequence, by preemption if necessary and allowed.

        Returns:
            False if there are no pages, or if the sequence itself was preempted.
        """
        if num_tokens <= self.slots.capacity[slot]:
            return True
        table = self._current_table(slot)
        while (new := self._cache.grow(table, num_tokens)) is None:
            self._cache.pool.claim(self._cache.num_needed(table, num_tokens))
            if not may_preempt or self._preempt_last() == slot:
                return False
        copies += new
        first = max(0, int(self.slots.num_pages[slot]) - 1)  # the only page that may be copied
        self.slots.set_pages(slot, table.pages, first)
        self.slots.capacity[slot] = len(table.pages) * self._cache.page_size
        return True

    def truncate(self, slot: int) -> None:
        """Release the pages past the dispatched tokens, such as those of rejected draft tokens."""
        table, num_tokens = self._current_table(slot), int(self.slots.num_dispatched[slot])
        self._cache.truncate(table, num_tokens)
        self.slots.set_pages(slot, table.pages, len(table.pages))
        self.slots.capacity[slot] = len(table.pages) * self._cache.page_size

    def _current_table(self, slot: int) -> PageTable:
        """The page table of a slot, with the number of tokens dispatched so far."""
        table = self.page_tables[slot]
        table.num_tokens = int(self.slots.num_dispatched[slot])
        return table

    def insert_prefix(self, slot: int, num_tokens: int) -> None:
        """Insert the full pages of a slot's computed tokens into the prefix cache.

        A page that a fork holds, too, cannot be inserted yet; it is tried again when another page is full.
        """
        table, size = self.page_tables[slot], self._cache.page_size
        self.slots.num_inserted[slot] = (num_tokens // size + 1) * size
        if not self._cache.shares_prefixes:
            return
        before = table.num_cached_pages
        self._cache.insert_prefix(table, self.slots.tokens[slot, :num_tokens])
        self.slots.set_pages(slot, table.pages, before)
        known = self._prefixes.num_pages(slot)
        new = page_keys(self.slots.history(slot)[known * size :], size)
        self._prefixes.add(slot, prefix_hashes(new, self._prefixes.last_hash(slot)))

    def first_needed(self, num_tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The first page that the tokens after so many may see, for each."""
        window = self._cache.window
        if window is None:
            return np.zeros_like(num_tokens)
        return np.maximum(0, num_tokens - window + 1) // self._cache.page_size

    def give_back(self, slot: int, num_tokens: int) -> None:
        """Release the pages that no token after the first `num_tokens` may see. These are computed, and stay.

        Iterations in flight may still have the pages in their tables. They do not read them, and run before the iterations
        of the pages' next owner.
        """
        table, before = self.page_tables[slot], int(self.slots.num_given_back[slot])
        self._cache.give_back(table, num_tokens)
        self.slots.tables[slot, before : table.num_given_back] = self.slots.scratch_page
        self.slots.num_given_back[slot] = table.num_given_back
