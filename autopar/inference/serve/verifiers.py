"""Score chains of thought, by any callable or by a model.

In: chains. Out: `Verifier`s; `Scoring`, the scores that are being computed. A model scores all chains that wait in one batch, beside the
chains that are still being sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.errors import InferenceError
from autopar.inference.serve.chains import Chain
from autopar.inference.serve.engine import Engine
from autopar.inference.serve.generation import Generation

#: The score of a chain; higher is better.
Verifier = Callable[[Chain], float]


def mean_logprob(chain: Chain) -> float:
    """The mean logprob of the tokens that the model has sampled."""
    return chain.logprob / max(1, chain.num_drawn)


@dataclass(frozen=True, slots=True)
class ModelVerifier:
    """A verifier that is a model. Made by `asking`.

    Args:
        engine, question: as for `asking`. yes: the token whose probability is the score.
    """

    engine: Engine
    question: Callable[[Chain], str | Sequence[int]]
    yes: int

    def submit(self, chain: Chain, priority: int = 0) -> Generation:
        """Queue the question about a chain."""
        tokens = self.engine.tokens_of(self.question(chain))
        return self.engine.submit((*tokens, self.yes), max_tokens=1, scored_from=len(tokens), priority=priority)

    def score_of(self, judged: Generation) -> float:
        """The score, once the question has been computed."""
        return math.exp(judged.prompt_scores[len(judged.request.prompt) - 1][0])

    def __call__(self, chain: Chain) -> float:
        """Score one chain, and wait for it."""
        return self.score_of(self.submit(chain).result())


def asking(engine: Engine, question: Callable[[Chain], str | Sequence[int]], yes: str | int) -> ModelVerifier:
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
    return ModelVerifier(engine, question, tokens[0])


@dataclass(eq=False)
class Scoring:
    """The scores that are being computed.

    Args:
        verifier: the callable or the model. priority: of a model's requests, as in `Request`.
    """

    verifier: Verifier
    priority: int = 0
    _submitted: list[tuple[Chain, Generation]] = field(default_factory=list)
    _scored: list[tuple[Chain, float | None]] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """The number of chains whose score has not been taken."""
        return len(self._submitted) + len(self._scored)

    def add(self, chain: Chain) -> None:
        """Score a chain. An exception of the verifier becomes the chain's `error`, and its score is None."""
        try:
            if isinstance(self.verifier, ModelVerifier):
                self._submitted.append((chain, self.verifier.submit(chain, self.priority)))
            else:
                self._scored.append((chain, float(self.verifier(chain))))
        except Exception as error:  # an error in the user's code must not stop the other chains
            chain.error = error
            self._scored.append((chain, None))

    def step(self) -> bool:
        """Step the model's engine if it has questions; whether there was anything to do."""
        return bool(self._submitted) and isinstance(self.verifier, ModelVerifier) and self.verifier.engine.step()

    def taken(self) -> list[tuple[Chain, float | None]]:
        """Take the scores that are there."""
        for each in [each for each in self._submitted if each[1].ended is not None]:
            self._submitted.remove(each)
            chain, judged = each
            try:
                assert isinstance(self.verifier, ModelVerifier)
                self._scored.append((chain, self.verifier.score_of(judged.result())))
            except Exception as error:  # the model's logits were not finite, for example
                chain.error = error
                self._scored.append((chain, None))
        scored, self._scored = self._scored, []
        return scored

    def stop(self) -> None:
        """Abort the questions that are left."""
        for _, judged in self._submitted:
            judged.abort()
