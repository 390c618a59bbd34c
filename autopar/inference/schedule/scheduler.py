"""What runs next: requests to iterations, by numbers only.

In: requests, a `PagedCache`, and what came out of each iteration. Out: `Iteration`s. No model, no device and no clock
is known here, so a day of traffic is simulated in seconds.

- Continuous batching: a slot is given to the next request in the iteration after its last one ended. A burst waits in
  a queue, in the order of arrival.
- Prompts are computed in chunks beside the slots that generate, so that these never wait for a long prompt.
- What has been sent to the device need not be computed again: a request whose tokens but the last a sequence that runs
  has sent begins as its fork, and generates at once. One whose prefix is being computed waits for it.
- Admission by reservation: a request is let in when there are pages for its whole prompt, besides those promised to
  others and one for each sequence that generates. Pages are taken as they are needed.
- Where there is no page for the next token, the youngest sequence gives all its own back and waits to be computed
  again; the oldest always goes on, so all end.
- Dispatch ahead: `next` may be called again before `took`. What a slot generated last may be unknown then; it is on
  the device. What ended or was preempted meanwhile ignores what comes out; its pages may be another's already, for
  the device works in order: whoever has a page now writes after, and reads only what it wrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import InferenceError
from autopar.inference.kv_cache.page_tables import Copy, PagedCache, PageTable
from autopar.inference.schedule.requests import Iteration, Options, Progress, Request, Result, Run, Shape
from autopar.inference.schedule.speculation_policy import Asked, Payoff, Proposer


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request that runs.

    Args:
        tokens: prompt and generated, as far as known.
        num_sent: whose computation has been sent to the device. In its table there is room for these.
        num_unknown: generated on the device, not known here.
        is_verified: proposals are under way, so how many tokens there will be is open.
    """

    request: Request
    attempt: int
    slot: int
    table: PageTable
    tokens: list[int]
    num_sent: int
    num_unknown: int = 0
    is_verified: bool = False

    @property
    def num_left(self) -> int:
        """Tokens to be computed before the next can be generated."""
        return len(self.tokens) + self.num_unknown - self.num_sent

    @property
    def num_to_generate(self) -> int:
        return self.request.max_tokens - (len(self.tokens) + self.num_unknown - len(self.request.prompt))

    @property
    def generates(self) -> bool:
        return self.num_left == 1 and self.num_to_generate > 0 and not self.is_verified


class Scheduler:
    """Decides iterations.

    Args:
        cache: the model's.
        proposer: guesses what follows, where `options.num_proposals` is not 0.
        payoff: says when it is asked; by default always.
    """

    def __init__(
        self,
        cache: PagedCache,
        options: Options | None = None,
        proposer: Proposer | None = None,
        payoff: Payoff | None = None,
    ) -> None:
        self.cache = cache
        self.options = options or Options()
        self._proposer = proposer if self.options.num_proposals else None
        self._payoff = payoff
        self._waiting: deque[tuple[Request, list[int]]] = deque()
        self._running: dict[str, _Sequence] = {}  # the oldest first
        self._slots = list(range(self.options.num_slots - 1, -1, -1))
        self._names: set[str] = set()
        self._attempts = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the pages of the sequences that run."""
        return sum(sequence.num_sent for sequence in self._running.values())

    # -- requests ----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InferenceError: it can never be served. Nothing is queued then.
        """
        length, longest = len(request.prompt) + request.max_tokens, self.options.max_length
        named = f"request {request.name!r}"
        if request.name in self._names:
            raise InferenceError(f"{named} is under way already: give each its own name")
        if not request.prompt or request.max_tokens < 1:
            raise InferenceError(
                f"{named} has {len(request.prompt)} prompt tokens and asks for {request.max_tokens}: at least one of each"
            )
        if length > longest:
            raise InferenceError(
                f"{named} has {len(request.prompt)} prompt tokens and asks for {request.max_tokens} more, but a sequence "
                f"has at most {longest}: shorten the prompt, ask for fewer, or serve with a larger max_length"
            )
        needed, there = self.cache.num_pages(length), self.cache.pool.num_pages
        if needed > there:
            raise InferenceError(
                f"{named} may need {needed} pages of {self.cache.page_size} tokens, but the cache has {there}: shorten "
                "the prompt, ask for fewer tokens, or leave the cache more memory"
            )
        self._names.add(request.name)
        self._waiting.append((request, list(request.prompt)))

    def abort(self, name: str) -> bool:
        """End a request whose result nobody wants any more; False where there is none of that name."""
        if name not in self._names:
            return False
        if name in self._running:
            self._remove(self._running[name])
        else:
            self._waiting = deque(each for each in self._waiting if each[0].name != name)
        self._names.remove(name)
        return True

    # -- decisions ---------------------------------------------------------------------------

    def next(self) -> Iteration | None:
        """What to run; None where nothing can before something comes out, is submitted, or gives pages back."""
        self._admit()
        if self._is_to_be_asked and any(each.num_unknown for each in self._all_generate()):
            return None
        copies: list[Copy] = []
        proposed = self._proposals()
        shape = Shape(width=1 + self.options.num_proposals) if any(proposed.values()) else self._decode_shape()
        decodes = self._decodes(shape, proposed, copies)
        rows, length = (0, 0) if shape != Shape() else self._chunk_shape()
        is_idle = not decodes and not any(each.num_unknown or each.is_verified for each in self._running.values())
        chunks = self._chunks(rows, length, copies, may_preempt=is_idle)
        if chunks:
            shape = Shape(rows=rows, length=length)
        if not decodes and not chunks:
            return None
        assert len(copies) <= len(decodes) + len(chunks), "a run writes to one page that others read, at most"
        return Iteration(shape, tuple(copies), tuple(decodes), tuple(chunks))

    def took(self, iteration: Iteration, results: Mapping[str, Result]) -> list[Progress]:
        """Take what came out of an iteration, in the order in which they were decided.

        Args:
            results: of each run by name; those of requests that have ended meanwhile may be missing.
        """
        progress: list[Progress] = []
        for run in iteration.runs:
            sequence = self._running.get(run.name)
            if sequence is not None and sequence.attempt == run.attempt:
                told = self._take(sequence, run, results[run.name], iteration.shape)
                if told is not None:
                    progress.append(told)
        self._tell_payoff(iteration, results)
        return progress

    def _tell_payoff(self, iteration: Iteration, results: Mapping[str, Result]) -> None:
        if self._payoff is None or not iteration.decodes:
            return
        if iteration.shape.width == 1:
            self._payoff.plain(iteration.shape.steps)
        elif given := [len(results[run.name].tokens) for run in iteration.decodes if run.name in results]:
            self._payoff.verified(sum(given), len(given))

    # -- admission and preemption --------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self._slots:
            request, tokens = self._waiting[0]
            table = self._begun(tokens)
            if table is None:
                return
            if not self._is_room(tokens, table):
                self.cache.release(table)
                return
            self._waiting.popleft()
            self._attempts += 1
            slot = self._slots.pop()
            self._running[request.name] = _Sequence(request, self._attempts, slot, table, tokens, table.num_tokens)

    def _begun(self, tokens: list[int]) -> PageTable | None:
        """A table with what is there of its tokens, found or shared with a sequence that runs.

        Returns:
            None where such a sequence has more of them, known but not all sent yet: worth waiting for, and not for long,
            for it sends them, or ends, or is preempted.
        """
        table = self.cache.start(tokens)
        if not self.cache.shares_prefixes:
            return table
        best, source = (table.num_tokens, True), None
        for sequence in self._running.values():
            num = self.cache.num_shareable(tokens, sequence.tokens, table.num_tokens)
            if (num, num <= sequence.num_sent) > best:
                best, source = (num, num <= sequence.num_sent), sequence
            if best == (len(tokens) - 1, True):
                break
        if source is None:
            return table
        self.cache.release(table)
        num, is_sent = best
        return self.cache.fork(source.table, num) if is_sent else None

    def _is_room(self, tokens: list[int], table: PageTable) -> bool:
        """For all of its tokens and the first generated, when all that run have theirs, and their next page."""
        promised = sum(
            self.cache.num_needed(each.table, len(each.tokens) + each.num_unknown + 1) + 1
            for each in self._running.values()
        )
        return self.cache.num_needed(table, len(tokens) + 1) + promised <= self.cache.pool.num_available

    def _remove(self, sequence: _Sequence) -> None:
        self.cache.release(sequence.table)
        self._slots.append(sequence.slot)
        del self._running[sequence.request.name]

    def _preempt_youngest(self) -> _Sequence:
        """To be computed again, before all that wait."""
        sequence = next(reversed(self._running.values()))
        self._remove(sequence)
        self._waiting.appendleft((sequence.request, sequence.tokens))
        return sequence

    # -- slots that generate -------------------------------------------------------------------

    def _all_generate(self) -> list[_Sequence]:
        """All sequences that are not about to end, where no prompt is to be computed; else none."""
        going_on = [sequence for sequence in self._running.values() if sequence.num_to_generate > 0]
        return going_on if all(sequence.generates for sequence in going_on) else []

    @property
    def _is_to_be_asked(self) -> bool:
        return self._proposer is not None and (self._payoff is None or self._payoff.is_on)

    def _proposals(self) -> dict[str, tuple[int, ...]]:
        """Guesses of what each sequence will generate; none where prompts are to be computed."""
        if self._proposer is None or not self._is_to_be_asked:
            return {}
        most = {each: min(self.options.num_proposals, each.num_to_generate - 1) for each in self._all_generate()}
        asking = [each for each, num in most.items() if num > 0]
        guesses = self._proposer.propose([Asked(each.slot, each.tokens, most[each]) for each in asking])
        return {each.request.name: tuple(guess[: most[each]]) for each, guess in zip(asking, guesses, strict=True)}

    def _decode_shape(self) -> Shape:
        """Many steps where nobody waits, and all have as many to go and room for them."""
        steps, generating = self.options.steps, self._all_generate()
        if self._waiting or not generating or any(sequence.num_to_generate < steps for sequence in generating):
            return Shape()
        needed = sum(self.cache.num_needed(each.table, each.num_sent + steps) for each in generating)
        return Shape(steps=steps) if needed <= self.cache.pool.num_available else Shape()

    def _decodes(self, shape: Shape, proposed: Mapping[str, tuple[int, ...]], copies: list[Copy]) -> list[Run]:
        """A run of each sequence that generates, the oldest first."""
        runs: list[Run] = []
        for sequence in list(self._running.values()):
            name = sequence.request.name
            if name not in self._running or not sequence.generates:
                continue
            guess = proposed.get(name, ())
            num_tokens = shape.steps + len(guess)
            if not self._grown(sequence, sequence.num_sent + num_tokens, copies):
                continue
            known = () if sequence.num_unknown else (sequence.tokens[-1], *guess)
            runs.append(self._sent(sequence, num_tokens, known))
            sequence.is_verified = shape.width > 1
            sequence.num_unknown += 0 if sequence.is_verified else shape.steps
        return runs

    def _grown(self, sequence: _Sequence, num_tokens: int, copies: list[Copy]) -> bool:
        """Make room, if need be by preemption; False where it was preempted itself."""
        while (made := self.cache.grow(sequence.table, num_tokens)) is None:
            if self._preempt_youngest() is sequence:
                return False
        copies += made
        return True

    # -- prompts ------------------------------------------------------------------------------

    def _prompts(self) -> list[_Sequence]:
        return [sequence for sequence in self._running.values() if sequence.num_left > 1]

    def _chunk_shape(self) -> tuple[int, int]:
        """Rows and length in which most tokens are computed now; of those, in which least is padded."""
        left = [sequence.num_left for sequence in self._prompts()]

        def worth(chunk: tuple[int, int]) -> tuple[int, int]:
            rows, length = chunk
            return sum(min(num, length) for num in left[:rows]), -rows * length

        return max(self.options.chunks, key=worth)

    def _chunks(self, rows: int, length: int, copies: list[Copy], *, may_preempt: bool) -> list[Run]:
        """Of the oldest prompts the next chunk each.

        Args:
            may_preempt: nothing else runs or is on its way, so no page will be given back but by preemption.
        """
        runs: list[Run] = []
        for sequence in self._prompts()[:rows]:
            if sequence.request.name not in self._running:
                continue
            num_tokens = min(length, sequence.num_left)
            if may_preempt and not runs:
                if not self._grown(sequence, sequence.num_sent + num_tokens, copies):
                    continue
            else:
                made = self.cache.grow(sequence.table, sequence.num_sent + num_tokens)
                if made is None:
                    break
                copies += made
            tokens = tuple(sequence.tokens[sequence.num_sent : sequence.num_sent + num_tokens])
            samples = num_tokens == sequence.num_left
            runs.append(self._sent(sequence, num_tokens, tokens, samples=samples))
            sequence.num_unknown += samples
        return runs

    # -- runs, and what comes out ---------------------------------------------------------------

    def _sent(self, sequence: _Sequence, num_tokens: int, tokens: tuple[int, ...], *, samples: bool = True) -> Run:
        start = sequence.num_sent
        sequence.num_sent += num_tokens
        pages = tuple(sequence.table.pages)
        return Run(sequence.request.name, sequence.attempt, sequence.slot, start, num_tokens, tokens, pages, samples)

    def _take(self, sequence: _Sequence, run: Run, result: Result, shape: Shape) -> Progress | None:
        """Tokens to their sequence; what follows its end is dropped."""
        num_done = run.start + run.num_tokens
        if shape.width > 1:  # of the proposals, the rejected lie in the cache in vain
            sequence.is_verified = False
            num_done = sequence.num_sent = run.start + len(result.tokens)
        elif run.samples:
            sequence.num_unknown -= shape.steps
        new: list[int] = []
        ended = result.ended
        for token in result.tokens if run.samples else ():
            sequence.tokens.append(token)
            new.append(token)
            ended = ended or self._ended(sequence, token)
            if ended:
                break
        if result.ended is None:  # else what is in its pages may be what it is ended for
            self.cache.insert_prefix(sequence.table, sequence.tokens[:num_done])
        if ended:
            self._remove(sequence)
            self._names.remove(sequence.request.name)
        elif shape.width > 1:
            self.cache.truncate(sequence.table, sequence.num_sent)
        return Progress(sequence.request.name, tuple(new), ended) if new or ended else None

    def _ended(self, sequence: _Sequence, token: int) -> str | None:
        if token in sequence.request.stop_tokens:
            return "stop"
        generated = len(sequence.tokens) - len(sequence.request.prompt)
        return "length" if generated >= sequence.request.max_tokens else None
