"""Schedule requests into iterations: continuous batching, chunked prefill, preemption, speculative decoding.

In: requests, a `PagedCache`, and the results of each iteration. Out: `Iteration`s. The scheduler knows no model, device or
clock, so a day of traffic is simulated in seconds.

- Continuous batching: when a sequence ends, its slot goes to the next request in the following iteration. Requests wait in
  the order of arrival.
- Chunked prefill: prompts are computed in chunks, in the same iterations as the decode steps of other slots, so decoding
  never waits for a long prompt.
- Prefix sharing, admission, preemption: see `admission.py`.
- Dispatch ahead: `next` may be called again before `update`. Then the last token of a slot may be on the device only.
  Results of a sequence that ended or was preempted meanwhile are ignored. Its pages may be reused at once, because the
  device runs iterations in order: the new owner writes a page later, and reads only what it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import InferenceError
from autopar.inference.kv_cache.page_tables import Copy, PagedCache
from autopar.inference.schedule.admission import Admission, Sequence
from autopar.inference.schedule.requests import Iteration, Options, Progress, Request, Result, Run, Shape
from autopar.inference.schedule.speculation_policy import DraftRequest, Proposer, SpeculationPolicy


class Scheduler:
    """Decide the iterations of one model.

    Args:
        cache: the page tables of the model.
        proposer: the source of draft tokens; used if `options.num_proposals` is not 0.
        policy: decides when to speculate; by default always.
    """

    def __init__(
        self,
        cache: PagedCache,
        options: Options | None = None,
        proposer: Proposer | None = None,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self.cache = cache
        self.options = options or Options()
        self._proposer = proposer if self.options.num_proposals else None
        self._policy = policy
        self._admission = Admission(cache, self.options.num_slots)
        self._names: set[str] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def num_running(self) -> int:
        return len(self._admission.running)

    @property
    def num_cached_tokens(self) -> int:
        """The number of tokens in the pages of running sequences."""
        return sum(sequence.num_dispatched for sequence in self._admission.running.values())

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
        needed, num_pages = self.cache.num_pages(length), self.cache.pool.num_pages
        if needed > num_pages:
            raise InferenceError(
                f"{named} may need {needed} pages of {self.cache.page_size} tokens, but the cache has {num_pages}: shorten "
                "the prompt, reduce max_tokens, or leave the cache more memory"
            )
        self._names.add(request.name)
        self._admission.waiting.append((request, list(request.prompt)))

    def abort(self, name: str) -> bool:
        """Abort a request; False if no request has the name."""
        if name not in self._names:
            return False
        self._admission.drop(name)
        self._names.remove(name)
        return True

    def next(self) -> Iteration | None:
        """Decide the next iteration; None if nothing can run before an update, a new request, or a released page."""
        self._admission.admit()
        if self._is_speculating and any(each.num_pending for each in self._decoding()):
            return None
        copies: list[Copy] = []
        drafts = self._draft_tokens()
        shape = Shape(width=1 + self.options.num_proposals) if any(drafts.values()) else self._decode_shape()
        decodes = self._decode_runs(shape, drafts, copies)
        rows, length = (0, 0) if shape != Shape() else self._chunk_shape()
        running = self._admission.running.values()
        is_idle = not decodes and not any(each.num_pending or each.is_verifying for each in running)
        chunks = self._chunk_runs(rows, length, copies, may_preempt=is_idle)
        if chunks:
            shape = Shape(rows=rows, length=length)
        if not decodes and not chunks:
            return None
        assert len(copies) <= len(decodes) + len(chunks), "a run copies at most one page"
        return Iteration(shape, tuple(copies), tuple(decodes), tuple(chunks))

    def update(self, iteration: Iteration, results: Mapping[str, Result]) -> list[Progress]:
        """Apply the results of an iteration. Iterations are updated in the order in which `next` returned them.

        Args:
            results: the result of each run by name; those of requests that have ended meanwhile may be missing.
        """
        progress: list[Progress] = []
        for run in iteration.runs:
            sequence = self._admission.running.get(run.name)
            if sequence is not None and sequence.attempt == run.attempt:
                new = self._update_sequence(sequence, run, results[run.name], iteration.shape)
                if new is not None:
                    progress.append(new)
        self._update_policy(iteration, results)
        return progress

    def _update_policy(self, iteration: Iteration, results: Mapping[str, Result]) -> None:
        if self._policy is None or not iteration.decodes:
            return
        if iteration.shape.width == 1:
            self._policy.record_plain(iteration.shape.steps)
        elif counts := [len(results[run.name].tokens) for run in iteration.decodes if run.name in results]:
            self._policy.record_verified(sum(counts), len(counts))

    def _decoding(self) -> list[Sequence]:
        """All sequences with tokens to generate, if no prompt remains to be computed; else none."""
        sequences = [sequence for sequence in self._admission.running.values() if sequence.num_to_generate > 0]
        return sequences if all(sequence.can_decode for sequence in sequences) else []

    @property
    def _is_speculating(self) -> bool:
        return self._proposer is not None and (self._policy is None or self._policy.is_enabled)

    def _draft_tokens(self) -> dict[str, tuple[int, ...]]:
        """Draft tokens of each sequence by name; none while prompts remain to be computed."""
        if self._proposer is None or not self._is_speculating:
            return {}
        limits = {each: min(self.options.num_proposals, each.num_to_generate - 1) for each in self._decoding()}
        chosen = [each for each, limit in limits.items() if limit > 0]
        drafts = self._proposer.propose([DraftRequest(each.slot, each.tokens, limits[each]) for each in chosen])
        return {each.request.name: tuple(draft[: limits[each]]) for each, draft in zip(chosen, drafts, strict=True)}

    def _decode_shape(self) -> Shape:
        """Several steps in one call if no request waits, and every sequence has tokens to generate and pages for them."""
        steps, decoding = self.options.steps, self._decoding()
        if self._admission.waiting or not decoding or any(sequence.num_to_generate < steps for sequence in decoding):
            return Shape()
        needed = sum(self.cache.num_needed(each.table, each.num_dispatched + steps) for each in decoding)
        return Shape(steps=steps) if needed <= self.cache.pool.num_available else Shape()

    def _decode_runs(self, shape: Shape, drafts: Mapping[str, tuple[int, ...]], copies: list[Copy]) -> list[Run]:
        """One run for each sequence that decodes, oldest first."""
        runs: list[Run] = []
        running = self._admission.running
        for sequence in list(running.values()):
            name = sequence.request.name
            if name not in running or not sequence.can_decode:
                continue
            draft = drafts.get(name, ())
            num_tokens = shape.steps + len(draft)
            if not self._admission.grow(sequence, sequence.num_dispatched + num_tokens, copies):
                continue
            known = () if sequence.num_pending else (sequence.tokens[-1], *draft)
            runs.append(self._dispatch(sequence, num_tokens, known))
            sequence.is_verifying = shape.width > 1
            sequence.num_pending += 0 if sequence.is_verifying else shape.steps
        return runs

    def _prefilling(self) -> list[Sequence]:
        return [sequence for sequence in self._admission.running.values() if sequence.num_to_compute > 1]

    def _chunk_shape(self) -> tuple[int, int]:
        """The chunk shape that computes the most tokens now; among equals, the one with the least padding."""
        num_tokens = [sequence.num_to_compute for sequence in self._prefilling()]

        def worth(chunk: tuple[int, int]) -> tuple[int, int]:
            rows, length = chunk
            return sum(min(num, length) for num in num_tokens[:rows]), -rows * length

        return max(self.options.chunks, key=worth)

    def _chunk_runs(self, rows: int, length: int, copies: list[Copy], *, may_preempt: bool) -> list[Run]:
        """The next chunk of each of the oldest prompts.

        Args:
            may_preempt: whether nothing decodes and no result is pending, so that only preemption can release pages.
        """
        runs: list[Run] = []
        for sequence in self._prefilling()[:rows]:
            if sequence.request.name not in self._admission.running:
                continue
            num_tokens = min(length, sequence.num_to_compute)
            if may_preempt and not runs:
                if not self._admission.grow(sequence, sequence.num_dispatched + num_tokens, copies):
                    continue
            else:
                new = self.cache.grow(sequence.table, sequence.num_dispatched + num_tokens)
                if new is None:
                    break
                copies += new
            tokens = tuple(sequence.tokens[sequence.num_dispatched : sequence.num_dispatched + num_tokens])
            samples = num_tokens == sequence.num_to_compute
            runs.append(self._dispatch(sequence, num_tokens, tokens, samples=samples))
            sequence.num_pending += samples
        return runs

    def _dispatch(self, sequence: Sequence, num_tokens: int, tokens: tuple[int, ...], *, samples: bool = True) -> Run:
        start = sequence.num_dispatched
        sequence.num_dispatched += num_tokens
        pages = tuple(sequence.table.pages)
        return Run(sequence.request.name, sequence.attempt, sequence.slot, start, num_tokens, tokens, pages, samples)

    def _update_sequence(self, sequence: Sequence, run: Run, result: Result, shape: Shape) -> Progress | None:
        """Append new tokens to a sequence. Tokens after its end are dropped."""
        num_done = run.start + run.num_tokens
        if shape.width > 1:  # the cache entries of rejected draft tokens are invalid
            sequence.is_verifying = False
            num_done = sequence.num_dispatched = run.start + len(result.tokens)
        elif run.samples:
            sequence.num_pending -= shape.steps
        new: list[int] = []
        ended = result.ended
        for token in result.tokens if run.samples else ():
            sequence.tokens.append(token)
            new.append(token)
            ended = ended or sequence.ended_by(token)
            if ended:
                break
        if result.ended is None:  # otherwise the pages may hold the non-finite values that ended the request
            self.cache.insert_prefix(sequence.table, sequence.tokens[:num_done])
        if ended:
            self._admission.remove(sequence)
            self._names.remove(sequence.request.name)
        elif shape.width > 1:
            self.cache.truncate(sequence.table, sequence.num_dispatched)
        return Progress(sequence.request.name, tuple(new), ended) if new or ended else None
