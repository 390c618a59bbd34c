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
from autopar.inference.serve.engine import Engine
from autopar.inference.serve.generation import Generation
from autopar.inference.step.sampling import NUM_CANDIDATES
from autopar.inference.step.sampling_params import SamplingOptions

#: The score of a finished chain; higher is better.
Verifier = Callable[["Chain"], float]
#: (text before the call) -> the tool's answer.
Tool = Callable[[str], str]


@dataclass(eq=False)
class Chain:
    """One chain of thought.

    Attributes:
        prompt: the tokens of the prompt.
        tokens: all later tokens, with the answers of tools.
        text: the text of `tokens` if the model has a tokenizer, with tool calls and their answers.
        logprob: the sum of the logprobs of the tokens that the model has sampled.
        num_drawn: the number of tokens that the model has sampled.
        ended: the reason of the end, as in `Generation`; "stopped" if another chain was accepted first.
        score: the verifier's score; None before, and if the verifier raised.
        error: the exception of the verifier or of a tool.
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
    sampling: SamplingOptions | None = None,
    max_tokens: int = 256,
    tools: Mapping[str, Tool] | None = None,
    max_calls: int = 8,
    **options: Any,
) -> Answers:
    """Sample n chains of thought for one prompt, and score each when it ends.

    Args:
        verifier: the function from a chain to its score; by default the mean logprob of its tokens. Its exceptions are
            stored in the chain, and the other chains continue.
        accept: a sufficient score: when a chain reaches it, all unfinished chains are stopped.
        sampling: the sampling options of the first chain; the others use the next seeds. By default temperature 1.
        max_tokens: the largest number of tokens that each chain samples, tool calls included.
        tools: callables by the text that ends a tool call, such as `"</search>"`. The callable gets the text before it, and
            the chain continues after the text that the callable returns.
        max_calls: the largest number of tool calls per chain.
        options: further arguments of `Engine.submit`.

    Raises:
        InferenceError: n is less than 1, all chains would be equal, or the prompt cannot be served.
    """
    sampling = sampling or SamplingOptions(temperature=1.0)
    if n < 1:
        raise InferenceError(f"the number of chains is {n}: give at least 1")
    if n > 1 and sampling.temperature == 0:
        raise InferenceError(f"at temperature 0 all {n} chains are equal: give a temperature above 0, or n = 1")
    running = deque[_RunningChain]()
    tools = dict(tools or {})
    try:
        for number in range(n):
            seeded = replace(sampling, seed=(sampling.seed + number) % 2**32)
            running.append(_RunningChain(engine, number, prompt, seeded, max_tokens, tools, max_calls, options))
        done: list[Chain] = []
        while running:
            ended = [each for each in running if each.advance()]
            for each in ended:
                running.remove(each)
                done.append(_scored(each.chain, verifier or mean_logprob))
            if any(chain.score is not None and chain.score >= accept for chain in done):
                break
            if not ended:
                engine.step()
    finally:
        for each in running:
            each.stop()
    stopped = [each.chain for each in running]
    return Answers(tuple(sorted(done + stopped, key=lambda chain: chain.number)))


def mean_logprob(chain: Chain) -> float:
    """The mean logprob of the tokens that the model has sampled."""
    return chain.logprob / max(1, chain.num_drawn)


def asking(engine: Engine, question: Callable[[Chain], str | Sequence[int]], yes: str | int) -> Verifier:
    """Make a verifier from a model: the score is the probability, 0 to 1, of one token after a question.

    Args:
        engine: the engine of the judging model, which may be the one that samples.
        question: the function from a chain to the prompt of the judging model.
        yes: the token whose probability is the score, or its text.

    Raises:
        InferenceError: `yes` is more than one token.
    """
    tokens = (yes,) if isinstance(yes, int) else engine.tokens_of(yes, special=False)
    if len(tokens) != 1:
        raise InferenceError(f"`yes` must be one token, but {yes!r} is {len(tokens)} tokens: give another word")

    def verify(chain: Chain) -> float:
        judged = engine.submit(question(chain), max_tokens=1, num_best=NUM_CANDIDATES).result()
        return math.exp(dict(judged.best[0]).get(tokens[0], -math.inf)) if judged.best else 0.0

    return verify


class _RunningChain:
    """A chain that is being sampled, by one request after another with a tool call between them.

    A request ends at the end of a tool call. The tool's answer is appended, and the next request continues from there. It
    finds its prefix in the cache, so only the answer is computed.
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
        options: Mapping[str, Any],
    ) -> None:
        self._engine, self._sampling, self._max_tokens = engine, sampling, max_tokens
        self._tools, self._num_calls, self._options = tools, num_calls, dict(options)
        self.chain = Chain(number, engine.tokens_of(prompt))
        self._generation = self._submit()

    def _submit(self) -> Generation:
        chain, own = self.chain, self._options.get("stop", ())
        stops = (*((own,) if isinstance(own, str) else own), *(self._tools if self._num_calls else ()))
        options = {**self._options, "stop": stops, "sampling": self._sampling, "max_tokens": self._max_tokens}
        return self._engine.submit((*chain.prompt, *chain.tokens), **options)

    def advance(self) -> bool:
        """Whether the chain has ended. At the end of a tool call, run the tool and continue the chain."""
        if self._generation.ended is None:
            return False
        chain, generation = self.chain, self._generation
        chain.tokens += generation.tokens
        chain.text += generation.text
        chain.logprob += sum(generation.logprobs)
        chain.num_drawn += len(generation.tokens)
        self._max_tokens -= len(generation.tokens)
        call = generation.stopped_at
        if call not in self._tools or self._max_tokens < 1:
            chain.ended = generation.ended
            return True
        try:
            answer = self._tools[call](generation.text)
            chain.text += call + answer
            chain.tokens += self._engine.tokens_of(answer, special=False)
            self._num_calls -= 1
            self._generation = self._submit()
        except Exception as error:  # the tool failed, or its answer does not fit
            chain.ended, chain.error = "failed", error
            return True
        return False

    def stop(self) -> None:
        """Abort the chain's request."""
        self._generation.abort()
        if self.chain.ended is None:
            self.chain.ended = "stopped"


def _scored(chain: Chain, verifier: Verifier) -> Chain:
    if chain.error is None and chain.ended in ("stop", "length"):
        try:
            chain.score = float(verifier(chain))
        except Exception as error:  # an error in the user's code must not stop the other chains
            chain.error = error
    return chain
