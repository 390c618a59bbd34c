"""Many chains of thought for one question: drawn together, judged, and one answer taken.

In: an engine, a prompt, and who judges: any callable, or another model. Out: `Answers`. All chains begin in the same
pages of the prompt; each costs the memory of what it adds. A chain may call tools on its way: any callable that takes
text and gives text.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import InferenceError
from autopar.inference.serve.engine import Engine
from autopar.inference.serve.generation import Generation
from autopar.inference.step.sampling import SamplingOptions

#: The score of a finished chain; the higher the better.
Verifier = Callable[["Chain"], float]
#: What a tool is asked, to what it answers.
Tool = Callable[[str], str]


@dataclass(eq=False)
class Chain:
    """One chain of thought.

    Attributes:
        prompt: tokens that it began with. tokens: all after these, what tools have said among them.
        text: of them, where the model has a tokenizer, with the calls of tools and their answers.
        logprob: the sum over the tokens that the model has drawn, and how many these are: `num_drawn`.
        ended: why, as of `Generation`; "stopped" where another chain was accepted first.
        score: by the verifier; None before, and where it raised: then `error` has that.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprob: float = 0.0
    num_drawn: int = 0
    ended: str | None = None
    score: float | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of a question.

    Args:
        chains: all, in order of their numbers.
    """

    chains: tuple[Chain, ...]

    @property
    def best(self) -> Chain:
        """The chain with the highest score; of equal ones the first.

        Raises:
            InferenceError: none has a score.
        """
        scored = [chain for chain in self.chains if chain.score is not None]
        if not scored:
            errors = [chain.error for chain in self.chains if chain.error is not None]
            why = f": {type(errors[0]).__name__}: {errors[0]}" if errors else ""
            raise InferenceError(f"no chain of {len(self.chains)} has a score{why}. See `error` of each chain") from (
                errors[0] if errors else None
            )
        return max(scored, key=lambda chain: (chain.score, -chain.number))

    def majority(self, answer: Callable[[Chain], Hashable | None] = lambda chain: chain.text.strip()) -> Any:
        """The answer that most finished chains give; of equally many that which came first.

        Args:
            answer: of a chain; None where it gives none.

        Raises:
            InferenceError: no chain gives one.
        """
        found = [answer(chain) for chain in self.chains if chain.ended in ("stop", "length")]
        counts = Counter(each for each in found if each is not None)
        if not counts:
            raise InferenceError(f"no chain of {len(self.chains)} gives an answer that could be counted")
        return counts.most_common(1)[0][0]


def best_of(
    engine: Engine,
    prompt: str | Sequence[int],
    n: int,
    verifier: Verifier | None = None,
    *,
    accept: float = math.inf,
    sampling: SamplingOptions | None = None,
    max_tokens: int = 256,
    tools: Mapping[str, Tool] | None = None,
    max_calls: int = 8,
    **asked: Any,
) -> Answers:
    """Draw n chains of thought over one prompt, and judge each when it ends.

    Args:
        verifier: scores a chain; by default the mean logprob of its tokens. What it raises is kept with its chain, and
            the others go on.
        accept: a score that is enough: the chains that are not done then are stopped.
        sampling: of the first chain; of the others with the next seeds. By default temperature 1.
        max_tokens: that each chain draws, at most, calls of tools and all.
        tools: by the text that ends a call, such as `"</search>"`; see `run_tools`.
        max_calls: of tools, in one chain.
        asked: as of `Engine.submit`.

    Raises:
        InferenceError: n is less than 1, all chains would be the same, or the prompt cannot be served.
    """
    sampling = sampling or SamplingOptions(temperature=1.0)
    if n < 1:
        raise InferenceError(f"best_of was asked for {n} chains: at least 1")
    if n > 1 and sampling.temperature == 0:
        raise InferenceError(f"at temperature 0 all {n} chains are the same: give a temperature above 0, or n = 1")
    under_way = deque[_UnderWay]()
    try:
        for number in range(n):
            seeded = replace(sampling, seed=(sampling.seed + number) % 2**32)
            under_way.append(_UnderWay(engine, number, prompt, seeded, max_tokens, dict(tools or {}), max_calls, asked))
        done: list[Chain] = []
        while under_way:
            ended = [each for each in under_way if each.is_ended()]
            for each in ended:
                under_way.remove(each)
                done.append(_judged(each.chain, verifier or mean_logprob))
            if any(chain.score is not None and chain.score >= accept for chain in done):
                break
            if not ended:
                engine.step()
    finally:
        for each in under_way:
            each.stop()
    stopped = [each.chain for each in under_way]
    return Answers(tuple(sorted(done + stopped, key=lambda chain: chain.number)))


def mean_logprob(chain: Chain) -> float:
    """How probable the model itself finds a chain, per token."""
    return chain.logprob / max(1, chain.num_drawn)


def asking(engine: Engine, question: Callable[[Chain], str | Sequence[int]], yes: str | int) -> Verifier:
    """A verifier that is a model: how probable it finds an answer, between 0 and 1.

    Args:
        engine: of the model that judges; it may be the same.
        question: the prompt that it is given of a chain. yes: its next token where the chain is right, or its text.

    Raises:
        InferenceError: `yes` is more than one token.
    """
    tokens = (yes,) if isinstance(yes, int) else engine.tokens_of(yes, special=False)
    if len(tokens) != 1:
        raise InferenceError(f"a verdict is one token, and {yes!r} is {len(tokens)} of the model's: give another word")

    def verify(chain: Chain) -> float:
        asked = engine.submit(question(chain), max_tokens=1, num_best=SamplingOptions().num_candidates).result()
        return math.exp(dict(asked.best[0]).get(tokens[0], -math.inf)) if asked.best else 0.0

    return verify


class _UnderWay:
    """A chain that is being drawn: one request after the other, a tool between each two.

    A request ends at the end of a call; what the tool says is put behind it, and the next request goes on from there.
    Its pages are found again, so that only what the tool has said is computed.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        prompt: str | Sequence[int],
        sampling: SamplingOptions,
        max_tokens: int,
        tools: dict[str, Tool],
        num_calls: int,
        asked: Mapping[str, Any],
    ) -> None:
        self._engine, self._sampling, self._left = engine, sampling, max_tokens
        self._tools, self._num_calls, self._asked = tools, num_calls, dict(asked)
        self.chain = Chain(number, engine.tokens_of(prompt))
        self._generation = self._submitted()

    def _submitted(self) -> Generation:
        chain, own = self.chain, self._asked.get("stop", ())
        stops = (*((own,) if isinstance(own, str) else own), *(self._tools if self._num_calls else ()))
        asked = {**self._asked, "stop": stops, "sampling": self._sampling, "max_tokens": self._left}
        return self._engine.submit((*chain.prompt, *chain.tokens), **asked)

    def is_ended(self) -> bool:
        """Whether nothing more is to be drawn; if the end of a call was, the tool is asked, and it goes on."""
        if self._generation.ended is None:
            return False
        chain, generation = self.chain, self._generation
        chain.tokens += generation.tokens
        chain.text += generation.text
        chain.logprob += sum(generation.logprobs)
        chain.num_drawn += len(generation.tokens)
        self._left -= len(generation.tokens)
        call = generation.stopped_at
        if call not in self._tools or self._left < 1:
            chain.ended = generation.ended
            return True
        try:
            said = self._tools[call](generation.text)
            chain.text += call + said
            chain.tokens += self._engine.tokens_of(said, special=False)
            self._num_calls -= 1
            self._generation = self._submitted()
        except Exception as error:  # a tool's, or no room for what it says
            chain.ended, chain.error = "failed", error
            return True
        return False

    def stop(self) -> None:
        """Nobody wants the rest."""
        self._generation.abort()
        if self.chain.ended is None:
            self.chain.ended = "stopped"


def _judged(chain: Chain, verifier: Verifier) -> Chain:
    if chain.error is None and chain.ended in ("stop", "length"):
        try:
            chain.score = float(verifier(chain))
        except Exception as error:  # the user's own code: the other chains go on
            chain.error = error
    return chain
