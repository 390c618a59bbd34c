"""Admit requests to slots and pages, and preempt them where pages run out.

In: requests, a `PagedCache`. Out: `Admission`: the requests that wait, and a `Sequence` for each that runs.

- Prefix sharing: a request is forked from a running sequence that has dispatched all of its tokens but the last, and
  decodes at once. A request whose prefix is being computed waits for it.
- Admission: a request is admitted when pages are available for its whole prompt, besides those that running sequences
  need for their prompts and one more for each. Pages are allocated when they are needed.
- Preemption: when no page is available for the next token, the youngest sequence releases its pages and waits to be
  recomputed. The oldest sequence always progresses, so every request ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from autopar.inference.kv_cache.page_tables import Copy, PagedCache, PageTable
from autopar.inference.schedule.requests import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """A running request.

    Args:
        tokens: the prompt and the generated tokens that the host knows.
        num_dispatched: the number of tokens whose computation has been dispatched. The table has room for these.
        num_pending: the number of generated tokens that are on the device only.
        is_verifying: whether draft tokens are being verified, so the number of new tokens is not yet known.
    """

    request: Request
    attempt: int
    slot: int
    table: PageTable
    tokens: list[int]
    num_dispatched: int
    num_pending: int = 0
    is_verifying: bool = False

    @property
    def num_to_compute(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) + self.num_pending - self.num_dispatched

    @property
    def num_to_generate(self) -> int:
        return self.request.max_tokens - (len(self.tokens) + self.num_pending - len(self.request.prompt))

    @property
    def can_decode(self) -> bool:
        return self.num_to_compute == 1 and self.num_to_generate > 0 and not self.is_verifying

    def ended_by(self, token: int) -> str | None:
        """Why the last token ends the request; None if it does not."""
        if token in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) - len(self.request.prompt) >= self.request.max_tokens else None


class Admission:
    """The waiting requests and the running sequences of one model.

    Attributes:
        waiting: requests with their tokens so far, in order. running: sequences by name, the oldest first.
    """

    def __init__(self, cache: PagedCache, num_slots: int) -> None:
        self.waiting: deque[tuple[Request, list[int]]] = deque()
        self.running: dict[str, Sequence] = {}
        self._cache = cache
        self._slots = list(range(num_slots - 1, -1, -1))
        self._attempts = 0

    def admit(self) -> None:
        """Admit waiting requests while a slot and pages are available."""
        while self.waiting and self._slots:
            request, tokens = self.waiting[0]
            table = self._start_table(tokens)
            if table is None:
                return
            if not self._has_room(tokens, table):
                self._cache.release(table)
                return
            self.waiting.popleft()
            self._attempts += 1
            slot = self._slots.pop()
            self.running[request.name] = Sequence(request, self._attempts, slot, table, tokens, table.num_tokens)

    def _start_table(self, tokens: list[int]) -> PageTable | None:
        """Make a table that shares the longest computed prefix, from the prefix cache or by a fork of a running sequence.

        Returns:
            None to wait for a longer prefix: a running sequence has it and has not dispatched all of it yet.
        """
        table = self._cache.start(tokens)
        if not self._cache.shares_prefixes:
            return table
        best, source = (table.num_tokens, True), None
        for sequence in self.running.values():
            num = self._cache.num_shareable(tokens, sequence.tokens, table.num_tokens)
            if (num, num <= sequence.num_dispatched) > best:
                best, source = (num, num <= sequence.num_dispatched), sequence
            if best == (len(tokens) - 1, True):
                break
        if source is None:
            return table
        self._cache.release(table)
        num, is_dispatched = best
        return self._cache.fork(source.table, num) if is_dispatched else None

    def _has_room(self, tokens: list[int], table: PageTable) -> bool:
        """Whether pages are available for a new sequence, besides those that running sequences reserve."""
        reserved = sum(  # the pages of all tokens of each, and one more
            self._cache.num_needed(each.table, len(each.tokens) + each.num_pending + 1) + 1
            for each in self.running.values()
        )
        return self._cache.num_needed(table, len(tokens) + 1) + reserved <= self._cache.pool.num_available

    def remove(self, sequence: Sequence) -> None:
        """Release the slot and pages of a sequence."""
        self._cache.release(sequence.table)
        self._slots.append(sequence.slot)
        del self.running[sequence.request.name]

    def drop(self, name: str) -> None:
        """Remove a request, whether it runs or waits."""
        if name in self.running:
            self.remove(self.running[name])
        else:
            self.waiting = deque(each for each in self.waiting if each[0].name != name)

    def _preempt_youngest(self) -> Sequence:
        """Preempt the youngest sequence. It is recomputed before any waiting request starts."""
        sequence = next(reversed(self.running.values()))
        self.remove(sequence)
        self.waiting.appendleft((sequence.request, sequence.tokens))
        return sequence

    def grow(self, sequence: Sequence, num_tokens: int, copies: list[Copy]) -> bool:
        """Allocate pages, by preemption if necessary; False if the sequence itself was preempted."""
        while (new := self._cache.grow(sequence.table, num_tokens)) is None:
            if self._preempt_youngest() is sequence:
                return False
        copies += new
        return True
