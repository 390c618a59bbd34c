"""Sample one chain of thought, with calls of tools in it.

In: an engine, a prompt, tools. Out: `Chain`; `RunningChain`, which is one request after another with a tool call between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.inference.serve.engine import Engine
from autopar.inference.serve.generation import Generation
from autopar.inference.step.sampling_params import SamplingOptions

#: (text before the call) -> the tool's answer.
Tool = Callable[[str], str]
#: Why a chain ended that was stopped, because another one was accepted, or because it was among the worse half at a review.
STOPPED, HOPELESS = "stopped", "hopeless"


@dataclass(eq=False)
class Chain:
    """One chain of thought.

    Attributes:
        prompt: the tokens of the prompt.
        tokens: all later tokens, with the answers of tools.
        text: the text of `tokens` if the model has a tokenizer, with tool calls and their answers.
        logprob: the sum of the logprobs of the tokens that the model has sampled.
        num_drawn: the number of tokens that the model has sampled.
        ended: the reason of the end, as in `Generation`; "stopped" if another chain was accepted first, or the budget was spent;
            "hopeless" if it was among the worse half at a review.
        score: the verifier's score; None before, and if the verifier raised.
        reviews: the number of tokens and the score at each review, in order.
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
    reviews: list[tuple[int, float]] = field(default_factory=list)
    error: BaseException | None = None


class RunningChain:
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

    @property
    def num_drawn(self) -> int:
        """The number of tokens that the model has sampled so far."""
        return self.chain.num_drawn + len(self._generation.tokens)

    def so_far(self) -> Chain:
        """The unfinished chain: a copy."""
        chain = replace(self.chain, tokens=list(self.chain.tokens))
        _append(chain, self._generation)
        return chain

    def advance(self) -> bool:
        """Whether the chain has ended. At the end of a tool call, run the tool and continue the chain."""
        if self._generation.ended is None:
            return False
        chain, generation = self.chain, self._generation
        _append(chain, generation)
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

    def stop(self, why: str = STOPPED) -> Chain:
        """Abort the chain's request, and return the chain with its tokens so far."""
        self._generation.abort()
        if self.chain.ended is None:
            _append(self.chain, self._generation)
            self.chain.ended = why
        return self.chain


def _append(chain: Chain, generation: Generation) -> None:
    """Append a request's tokens to a chain."""
    chain.tokens += generation.tokens
    chain.text += generation.text
    chain.logprob += sum(generation.logprobs)
    chain.num_drawn += len(generation.tokens)
