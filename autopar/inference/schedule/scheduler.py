"""Schedule requests into iterations: continuous batching, chunked prefill, preemption, speculative decoding.

In: requests, a `PagedCache`, and the results of each iteration. Out: `Iteration`s. The scheduler knows no model, device or
clock, so a day of traffic is simulated in seconds. It keeps all slots in arrays (`slot_arrays`), and changes them at once.

- Continuous batching: when a sequence ends, its slot goes to the next request in the following iteration.
- Chunked prefill: prompts are computed in chunks, in the same iterations as the decode steps of other slots, so decoding
  never waits for a long prompt. See `prefill_chunks.py` for the share of each prompt.
- Prefix sharing, admission, preemption: see `admission.py`.
- Dispatch ahead: `next` may be called again before `update`. Then the last token of a slot may be on the device only.
  Results of a sequence that ended or was preempted meanwhile are ignored. Its pages may be reused at once, because the
  device runs iterations in order: the new owner writes a page later, and reads only what it wrote.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InferenceError
from autopar.inference.kv_cache.page_tables import Copy, PagedCache
from autopar.inference.schedule.admission import Admission
from autopar.inference.schedule.prefill_chunks import divide_rows
from autopar.inference.schedule.requests import (
    Decodes,
    Iteration,
    Options,
    Request,
    Results,
    Run,
    Shape,
    Started,
    Update,
)
from autopar.inference.schedule.speculation_policy import DraftRequest, Proposer, SpeculationPolicy
from autopar.inference.schedule.take_results import take_results

#: While requests wait, the largest share of slots' steps that may be idle in a call of several steps, because a request ends.
_MOST_IDLE = 1 / 32


class Scheduler:
    """Decide the iterations of one model.

    Args:
        cache: the page tables of the model.
        proposer: the source of draft tokens; used if `options.num_proposals` is not 0.
        policy: decides when to speculate; by default always.
        scratch_page: the page that pads the page tables; by default the number of pages.

    Attributes:
        num_prompt_tokens: the number of prompt tokens dispatched so far.
    """

    def __init__(
        self,
        cache: PagedCache,
        options: Options | None = None,
        proposer: Proposer | None = None,
        policy: SpeculationPolicy | None = None,
        scratch_page: int | None = None,
    ) -> None:
        self.cache = cache
        self.options = options or Options()
        self._proposer = proposer if self.options.num_proposals else None
        self._policy = policy
        self._admission = Admission(cache, self.options, cache.pool.num_pages if scratch_page is None else scratch_page)
        self._slots = self._admission.slots
        self._names: set[str] = set()
        self._started: list[Started] = []
        self._shortest_first = False
        self.num_prompt_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def num_running(self) -> int:
        return len(self._admission.requests)

    @property
    def running(self) -> set[str]:
        """The names of running requests."""
        return {request.name for request in self._admission.requests.values()}

    @property
    def num_preempted(self) -> int:
        """The number of preemptions so far."""
        return self._admission.num_preempted

    @property
    def num_cached_tokens(self) -> int:
        """The number of tokens in the pages of running sequences."""
        return int(self._slots.num_dispatched.sum())

    @property
    def needs_results(self) -> bool:
        """Whether the next iteration would decode a token that only an iteration in flight can give."""
        return bool((self._slots.can_decode() & (self._slots.num_pending > 0)).any())

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InferenceError: the request can never be served. It is not queued.
        """
        length, longest = len(request.prompt) + request.max_tokens, self.options.max_length
        named = f"request {request.name!r}"
        if request.name in self._names:
            raise InferenceError(f"{named} is running already: give each request its own name")
        if not request.prompt or request.max_tokens < 1:
            raise InferenceError(
                f"{named} has {len(request.prompt)} prompt tokens and max_tokens={request.max_tokens}: both must be positive"
            )
        if length > longest:
            raise InferenceError(
                f"{named} has {len(request.prompt)} prompt tokens and max_tokens={request.max_tokens}, but a sequence has "
                f"at most {longest} tokens: shorten the prompt, reduce max_tokens, or serve with a larger max_length"
            )
        needed, num_pages = self._admission.most_held(length), self.cache.pool.num_pages
        if needed > num_pages:
            raise InferenceError(
                f"{named} may need {needed} pages of {self.cache.page_size} tokens, but the cache has {num_pages}: shorten "
                "the prompt, reduce max_tokens, or leave the cache more memory"
            )
        self._names.add(request.name)
        self._admission.add(request)

    def abort(self, name: str) -> bool:
        """Abort a request; False if no request has the name."""
        if name in self._names:
            self._admission.drop(name)
            self._names.remove(name)
            return True
        return False

    def start_over(self) -> None:
        """Let running requests wait again, and forget all prefixes, so that no page is held. No iteration may be in flight."""
        self._admission.preempt_all()
        self._started.clear()
        self.cache.forget_prefixes()

    def next(self) -> Iteration | None:
        """Decide the next iteration; None if nothing can run before an update, a new request, or a released page."""
        self._started += self._admission.admit()
        slots = self._slots
        if self._is_speculating and slots.num_pending[self._decoding()].any():
            return None
        copies: list[Copy] = []
        drafts = self._draft_tokens()
        shape = Shape(width=1 + self.options.num_proposals) if any(drafts.values()) else self._decode_shape()
        decodes = self._decodes(shape, drafts, copies)
        is_idle = not decodes.slots.size and not slots.num_pending.any() and not slots.is_verifying.any()
        chunks = self._chunks(copies, may_preempt=is_idle) if shape == Shape() else None
        if chunks is not None:
            shape, runs = chunks
        elif decodes.slots.size:
            runs = ()
        else:
            return None
        started, self._started = tuple(self._started), []
        return Iteration(shape, tuple(copies), started, decodes, runs, slots.tables)

    def update(self, iteration: Iteration, results: Results) -> Update:
        """Apply the results of an iteration. Iterations are updated in the order in which `next` returned them."""
        update = take_results(self._admission, iteration, results)
        self._names.difference_update(name for name, slot in zip(update.names, update.slots.tolist(), strict=True)
                                      if slot in update.ended)  # fmt: skip
        if self._policy is not None and iteration.decodes.slots.size:
            counts = results.num[iteration.decodes.slots] if iteration.shape.width > 1 else None
            self._policy.record(iteration.shape.steps, counts)
        return update

    def _decoding(self) -> NDArray[np.intp]:
        """All slots with tokens to generate, if no prompt remains to be computed; else none."""
        can_decode = self._slots.can_decode()
        if (can_decode == (self._slots.num_to_generate > 0)).all():
            return np.flatnonzero(can_decode)
        return np.zeros(0, np.intp)

    @property
    def _is_speculating(self) -> bool:
        return self._proposer is not None and (self._policy is None or self._policy.is_enabled)

    def _draft_tokens(self) -> dict[int, tuple[int, ...]]:
        """Draft tokens of each slot; none while prompts remain to be computed."""
        if self._proposer is None or not self._is_speculating:
            return {}
        slots, decoding = self._slots, self._slots.oldest_first(self._decoding())
        limits = {slot: min(self.options.num_proposals, int(slots.num_to_generate[slot]) - 1) for slot in decoding}
        requests = [DraftRequest(slot, slots.history(slot), limit) for slot, limit in limits.items() if limit > 0]
        drafts = self._proposer.propose(requests)
        return {each.slot: tuple(draft)[: each.max_tokens] for each, draft in zip(requests, drafts, strict=True)}

    def _decode_shape(self) -> Shape:
        """Several steps in one call if every sequence decodes, has pages for them, and few slots would be idle.

        A slot whose request ends within the call is idle until the end of the call. While no request waits, that costs
        nothing.
        """
        slots, steps, decoding = self._slots, self.options.steps, self._decoding()
        to_generate = slots.num_to_generate[decoding]
        if not decoding.size or to_generate.max() < steps or slots.is_constrained.any():
            return Shape()
        num_steps = np.minimum(to_generate, steps)
        if self._admission.waiting and (steps - num_steps).sum() > _MOST_IDLE * steps * self.options.num_slots:
            return Shape()
        num_pages = -(-(slots.num_dispatched[decoding] + num_steps) // self.cache.page_size)
        may_copy = slots.capacity[decoding] < slots.num_pages[decoding] * self.cache.page_size
        needed = (np.maximum(0, num_pages - slots.num_pages[decoding]) + may_copy).sum()
        return Shape(steps=steps) if needed <= self.cache.pool.num_available else Shape()

    def _decodes(self, shape: Shape, drafts: dict[int, tuple[int, ...]], copies: list[Copy]) -> Decodes:
        """The slots that decode. If pages run out, the last sequences in the order of admission are preempted."""
        slots = self._slots
        num_tokens = np.minimum(shape.steps, slots.num_to_generate)
        for slot, draft in drafts.items():
            num_tokens[slot] = 1 + len(draft)
        can_decode = slots.can_decode()
        short = np.flatnonzero(can_decode & (slots.num_dispatched + num_tokens > slots.capacity))
        for slot in slots.oldest_first(short):
            if slots.attempts[slot]:
                self._admission.grow(slot, int(slots.num_dispatched[slot] + num_tokens[slot]), copies)
        chosen = np.flatnonzero(can_decode & (slots.attempts > 0)).astype(np.int32)
        counts, starts = num_tokens[chosen], slots.num_dispatched[chosen]
        tokens = np.zeros((chosen.size, shape.width), np.int32)
        tokens[:, 0] = np.where(slots.num_pending[chosen] > 0, -1, slots.tokens[chosen, slots.num_known[chosen] - 1])
        for row, slot in enumerate(chosen.tolist() if drafts else ()):
            if draft := drafts.get(slot):
                tokens[row, 1 : 1 + len(draft)] = draft
        self.num_prompt_tokens += int(np.clip(slots.num_prompt[chosen] - starts, 0, counts).sum())
        slots.num_dispatched[chosen] += counts
        if shape.width > 1:
            slots.is_verifying[chosen] = True
        else:
            slots.num_pending[chosen] += counts
        names = slots.names
        return Decodes(
            chosen, slots.attempts[chosen], starts, counts, tokens, [names[slot] for slot in chosen.tolist()]
        )

    def _chunks(self, copies: list[Copy], *, may_preempt: bool) -> tuple[Shape, tuple[Run, ...]] | None:
        """The next prefill chunks, and the shape of the iteration with them; None if there are none.

        Args:
            may_preempt: whether nothing decodes and no result is pending, so that only preemption can release pages.
        """
        slots = self._slots
        prompts = slots.oldest_first(np.flatnonzero(slots.num_to_compute > 1))
        if not prompts:
            return None
        remaining = slots.num_to_compute[prompts].tolist()
        divided = divide_rows(remaining, self.options.chunks, shortest_first=self._shortest_first)
        self._shortest_first = not self._shortest_first and len(prompts) > 1
        runs: list[Run] = []
        for number, num_tokens in divided.num_tokens:
            slot = prompts[number]
            if not slots.attempts[slot]:  # preempted for another prompt
                continue
            end = int(slots.num_dispatched[slot]) + num_tokens
            if not self._admission.grow(slot, end, copies, may_preempt=may_preempt and not runs):
                if may_preempt and not runs:
                    continue
                break
            runs += self._runs(slot, num_tokens, divided.length)
        return (Shape(rows=divided.rows, length=divided.length), tuple(runs)) if runs else None

    def _runs(self, slot: int, num_tokens: int, length: int) -> list[Run]:
        """Dispatch the next tokens of a prompt, in chunks."""
        slots, runs = self._slots, []
        samples = num_tokens == slots.num_to_compute[slot]
        start, end = int(slots.num_dispatched[slot]), int(slots.num_dispatched[slot]) + num_tokens
        pages = tuple(slots.tables[slot, : slots.num_pages[slot]].tolist())
        for at in range(start, end, length):
            tokens = tuple(slots.tokens[slot, at : min(at + length, end)].tolist())
            is_last = at + length >= end
            name, attempt = slots.names[slot], int(slots.attempts[slot])
            following = self._next_token(slot, at + len(tokens))
            runs.append(Run(name, attempt, slot, at, len(tokens), tokens, pages, bool(samples and is_last), following))
        self.num_prompt_tokens += max(0, min(end, int(slots.num_prompt[slot])) - start)
        slots.num_dispatched[slot] = end
        slots.num_pending[slot] += samples
        return runs

    def _next_token(self, slot: int, end: int) -> int:
        """The token after a chunk that ends at a position, if logprobs of the chunk's next tokens are wanted; else -1."""
        scored_from = self._admission.requests[slot].scored_from
        if scored_from is None or end < scored_from:
            return -1
        return int(self._slots.tokens[slot, end]) if end < self._slots.num_known[slot] else 0
