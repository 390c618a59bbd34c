"""Sample several chains of thought for one prompt, score them, and select an answer (best-of-n, majority vote).

In: an engine, a prompt, a verifier (any callable, or another model). Out: `Answers`. All chains share the pages of the
prompt, so each costs only the memory of its own tokens. Chains may call tools, which are callables from text to text.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import InferenceError
from autopar.inference.serve.chains import HOPELESS, STOPPED, Chain, RunningChain, Tool
from autopar.inference.serve.engine import Engine
from autopar.inference.serve.verifiers import ModelVerifier, Scoring, Verifier, mean_logprob
from autopar.inference.step.sampling_params import SamplingOptions


@dataclass(frozen=True, slots=True)
class Answers:
    """The chains of one prompt.

    Args:
        chains: all chains, in the order of their numbers.
    """

    chains: tuple[Chain, ...]

    @property
    def best(self) -> Chain:
        """The chain with the highest score; the first among equals.

        Raises:
            InferenceError: no chain has a score.
        """
        scored = [chain for chain in self.chains if chain.score is not None]
        if not scored:
            errors = [chain.error for chain in self.chains if chain.error is not None]
            why = f": {type(errors[0]).__name__}: {errors[0]}" if errors else ""
            raise InferenceError(
                f"none of {len(self.chains)} chains has a score{why}. See `error` of each chain"
            ) from (errors[0] if errors else None)
        return max(scored, key=lambda chain: (chain.score, -chain.number))

    def majority(self, answer: Callable[[Chain], Hashable | None] = lambda chain: chain.text.strip()) -> Any:
        """The most frequent answer of finished chains; the first among equals.

        Args:
            answer: a function from a chain to its answer; None if the chain has none.

        Raises:
            InferenceError: no finished chain has an answer.
        """
        found = [answer(chain) for chain in self.chains if chain.ended in ("stop", "length")]
        counts = Counter(each for each in found if each is not None)
        if not counts:
            raise InferenceError(
                f"none of {len(self.chains)} chains has an answer: raise max_tokens, or check the `answer` function"
            )
        return counts.most_common(1)[0][0]


def best_of(
    engine: Engine,
    prompt: str | Sequence[int],
    n: int,
    verifier: Verifier | None = None,
    *,
    accept: float = math.inf,
    budget: int | None = None,
    sampling: SamplingOptions | None = None,
    max_tokens: int = 256,
    tools: Mapping[str, Tool] | None = None,
    max_calls: int = 8,
    **options: Any,
) -> Answers:
    """Sample n chains of thought for one prompt, and score each when it ends.

    Args:
        verifier: the function from a chain to its score, or a model (`asking`); by default the mean logprob of its tokens. Its
            exceptions are stored in the chain, and the other chains continue.
        accept: a sufficient score: when a chain reaches it, all unfinished chains are stopped.
        budget: the number of tokens that all chains may sample; by default without limit. With one, chains are reviewed: scored
            while they are unfinished, and those in the worse half of all that had the same review are stopped (successive
            halving). There are log2(n) reviews, and between two of them the chains that are left have as many tokens together
            as before. A call of several decode steps may exceed the budget by those steps.
        sampling: the sampling options of the first chain; the others use the next seeds. By default temperature 1.
        max_tokens: the largest number of tokens that each chain samples, tool calls included.
        tools: callables by the text that ends a tool call, such as `"</search>"`. The callable gets the text before it, and
            the chain continues after the text that the callable returns.
        max_calls: the largest number of tool calls per chain.
        options: further arguments of `Engine.submit`.

    Raises:
        InferenceError: n or the budget is less than 1, all chains would be equal, or the prompt cannot be served.
    """
    sampling = sampling or SamplingOptions(temperature=1.0)
    if n < 1:
        raise InferenceError(f"the number of chains is {n}: give at least 1")
    if budget is not None and budget < n:
        raise InferenceError(f"the budget is {budget} tokens for {n} chains: give at least one for each")
    if n > 1 and sampling.temperature == 0:
        raise InferenceError(f"at temperature 0 all {n} chains are equal: give a temperature above 0, or n = 1")
    first, tokens, tools = sampling, engine.tokens_of(prompt), dict(tools or {})

    def start(number: int) -> RunningChain:
        seeded = replace(first, seed=(first.seed + number) % 2**32)
        return RunningChain(engine, number, tokens, seeded, max_tokens, tools, max_calls, options)

    scoring = Scoring(verifier or mean_logprob, options.get("priority", 0) - 1)
    search = _Search(engine, start, scoring, accept, budget, n, deque(range(n)))
    try:
        while not search.is_over:
            search.advance()
    finally:
        search.stop()
    never = [Chain(number, tokens, ended=STOPPED) for number in search.waiting]
    return Answers(tuple(sorted([*search.ended, *never], key=lambda chain: chain.number)))


@dataclass(eq=False)
class _Search:
    """The chains of one prompt while they are sampled and scored.

    Args:
        start: starts a chain, by its number.
        scoring: the scores of chains that have ended, and of copies of those under review.
        n: the number of chains. waiting: the numbers of those that have not been started.
    """

    engine: Engine
    start: Callable[[int], RunningChain]
    scoring: Scoring
    accept: float
    budget: int | None
    n: int
    waiting: deque[int]
    running: list[RunningChain] = field(default_factory=list)
    ended: list[Chain] = field(default_factory=list)
    _under_review: dict[int, RunningChain] = field(default_factory=dict)  # by number
    _review_at: list[float] = field(init=False)  # the tokens of a chain at each review
    _scores: list[list[tuple[float, int]]] = field(init=False)  # at each review, with the numbers of the chains
    _num_reviews: Counter[int] = field(default_factory=Counter)  # by number
    _reviewed: list[RunningChain] = field(default_factory=list)  # with scores, until all of this review have theirs

    def __post_init__(self) -> None:
        num_rounds, at = math.ceil(math.log2(self.n)) + 1, 0.0
        self._review_at = []
        for number in range(num_rounds - 1 if self.budget is not None else 0):
            at += (self.budget or 0) / (num_rounds * math.ceil(self.n / 2**number))
            self._review_at.append(max(at, number + 1))
        self._scores = [[] for _ in self._review_at]

    @property
    def num_drawn(self) -> int:
        """The tokens that all chains have sampled."""
        return sum(chain.num_drawn for chain in self.ended) + sum(each.num_drawn for each in self.running)

    @property
    def is_over(self) -> bool:
        """Whether all chains have ended and are scored, one is accepted, or the budget is spent."""
        if any(chain.score is not None and chain.score >= self.accept for chain in self.ended):
            return True
        is_spent = self.budget is not None and self.num_drawn >= self.budget
        return not self.running and not self.scoring.num_waiting and (is_spent or not self.waiting)

    def advance(self) -> None:
        """Take what has ended, review chains, or step the engines."""
        changed = self._take_ended() + self._take_scores() + self._start_waiting()
        if self.budget is not None and self.running and self.num_drawn >= self.budget:
            self._end_unfinished(self.running)
        elif due := self._due():
            self._under_review = {each.chain.number: each for each in due}
            for each in due:
                self.scoring.add(each.so_far())
        elif not changed:
            stepped = self.engine.step() if self.running else False
            if not self._is_one_engine() or not stepped:
                self.scoring.step()

    def _start_waiting(self) -> int:
        """Start chains. If a model on the same engine reviews them, a quarter of the slots is left to it."""
        slots = self.engine.runner.served.options.num_slots
        is_shared = (
            isinstance(self.scoring.verifier, ModelVerifier) and self._is_one_engine() and self.budget is not None
        )
        most = max(1, slots - max(1, slots // 4)) if is_shared else self.n
        if self.budget is not None and self.num_drawn >= self.budget:
            return 0
        numbers = [self.waiting.popleft() for _ in range(min(len(self.waiting), most - len(self.running)))]
        self.running += map(self.start, numbers)
        return len(numbers)

    def _is_one_engine(self) -> bool:
        verifier = self.scoring.verifier
        return not isinstance(verifier, ModelVerifier) or verifier.engine is self.engine

    def _take_ended(self) -> int:
        ended = [each for each in self.running if each.advance()]
        for each in ended:
            self.running.remove(each)
            self._end(each.chain)
        return len(ended)

    def _end(self, chain: Chain) -> None:
        self.ended.append(chain)
        if chain.error is None and chain.ended in ("stop", "length"):
            self.scoring.add(chain)

    def _end_unfinished(self, chains: Sequence[RunningChain]) -> None:
        """End chains whose budget is spent. They are scored as they are."""
        for each in list(chains):
            self.running.remove(each)
            self._end(each.stop("length"))

    def _take_scores(self) -> int:
        taken, reviewed = self.scoring.taken(), list[RunningChain]()
        for chain, score in taken:
            if chain.ended is not None:
                chain.score = score
            elif chain.number in self._under_review:
                each = self._under_review.pop(chain.number)
                self._scores[self._num_reviews[chain.number]].append(
                    (-math.inf if score is None else score, -chain.number)
                )
                if each in self.running:  # it may have ended since
                    reviewed.append(each)
                    if score is not None:
                        each.chain.reviews.append((chain.num_drawn, score))
        self._reviewed += reviewed
        if self._reviewed and not self._under_review:
            self._stop_hopeless(self._reviewed)
            self._reviewed = []
        return len(taken)

    # -- the budget ------------------------------------------------------------------------------

    def _due(self) -> list[RunningChain]:
        """The chains to review now: those that have come to their next review, once all have that have begun."""
        if self._under_review or len(self.running) + len(self.waiting) < 2:
            return []
        begun = [
            each
            for each in self.running
            if each.num_drawn and self._num_reviews[each.chain.number] < len(self._review_at)
        ]
        due = [each for each in begun if each.num_drawn >= self._review_at[self._num_reviews[each.chain.number]]]
        return due if len(due) == len(begun) else []

    def _stop_hopeless(self, chains: Sequence[RunningChain]) -> None:
        """Stop those of the chains that are in the worse half of all that had the same review."""
        for each in chains:
            number = each.chain.number
            scores = sorted(self._scores[self._num_reviews[number]], reverse=True)
            place = [-other for _, other in scores].index(number)
            self._num_reviews[number] += 1
            if place >= (len(scores) + 1) // 2 and each in self.running:
                self.running.remove(each)
                self.ended.append(each.stop(HOPELESS))

    def stop(self) -> None:
        """Stop what still runs."""
        self.scoring.stop()
        self.ended += [each.stop() for each in self.running]
        self.running.clear()
