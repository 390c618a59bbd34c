"""Test best-of-n sampling of chains of thought: verifiers, early stopping, majority votes, tools."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import OPTIONS, is_idle, opened, write_model

from autopar.errors import InferenceError
from autopar.inference import Answers, Chain, Engine, SamplingOptions, asking, best_of

PROMPT = "What is six times seven? Let us think."  # 38 tokens: two pages, and a part of one


@pytest.fixture(scope="module")
def opened_once(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return opened(write_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture
def engine(opened_once: Engine) -> Engine:
    return Engine(opened_once.runner, opened_once.tokenizer)


def test_the_chain_with_the_highest_score_is_selected(engine: Engine) -> None:
    answers = best_of(engine, PROMPT, 6, lambda chain: -chain.number % 4, max_tokens=8)
    assert [chain.score for chain in answers.chains] == [0, 3, 2, 1, 0, 3]
    assert answers.best.number == 1
    assert len({tuple(chain.tokens) for chain in answers.chains}) == 6, "each chain has its own seed"
    again = best_of(engine, PROMPT, 2, max_tokens=8)
    assert [chain.tokens for chain in again.chains] == [chain.tokens for chain in answers.chains[:2]]
    for chain in again.chains:
        assert chain.score == chain.logprob / 8
    assert is_idle(engine)


def test_chains_stop_when_one_is_accepted(engine: Engine) -> None:
    """Four run at once. The others are stopped before they end."""
    answers = best_of(engine, PROMPT, 12, lambda chain: 1.0, accept=1.0, max_tokens=40)
    ended = Counter(chain.ended for chain in answers.chains)
    assert ended["length"] >= 1
    assert ended["stopped"] >= 8
    assert is_idle(engine)


def test_a_verifiers_exception_affects_its_chain_only(engine: Engine) -> None:
    def verify(chain: Chain) -> float:
        if chain.number != 2:
            raise KeyError("no answer")
        return 0.5

    answers = best_of(engine, PROMPT, 4, verify, max_tokens=5)
    assert answers.best.number == 2
    assert [type(chain.error) for chain in answers.chains] == [KeyError, KeyError, type(None), KeyError]
    none = best_of(engine, PROMPT, 2, lambda chain: 1 / 0, max_tokens=5)
    with pytest.raises(InferenceError, match="none of 2 chains has a score: ZeroDivisionError"):
        _ = none.best
    assert is_idle(engine)


@pytest.mark.slow
def test_coverage_equals_that_of_independent_samples(engine: Engine) -> None:
    """A chain is correct with probability p, by its first token. Then one of n is correct with 1 - (1 - p)^n."""
    folder = engine.runner
    model: Any = folder.served.model
    tokens = engine.tokens_of(PROMPT)
    logits = model.apply(folder._params, np.array([tokens]))[0][0, -1]
    probabilities = np.asarray(jax.nn.softmax(logits))
    right, p = set(), 0.0
    for token in np.argsort(-probabilities).tolist():
        if p + probabilities[token] <= 0.25:
            right.add(token)
            p += float(probabilities[token])
    n, trials = 3, 150
    solved = 0
    for trial in range(trials):
        sampling = SamplingOptions(1.0, seed=1000 * trial)
        answers = best_of(engine, PROMPT, n, lambda c: c.tokens[0] in right, sampling=sampling, max_tokens=1)
        solved += answers.best.score == 1
    expected = 1 - (1 - p) ** n
    deviation = math.sqrt(expected * (1 - expected) / trials)
    assert abs(solved / trials - expected) < 3.3 * deviation


def test_chains_share_the_pages_of_their_prompt(engine: Engine) -> None:
    """The 48 tokens of the prompt take three pages once; each chain adds its own pages."""
    prompt, most = list(range(48)), 0
    step = engine.step

    def counted() -> bool:
        nonlocal most
        did_step = step()
        most = max(most, engine.stats.held_pages)
        return did_step

    engine.step = counted  # pyright: ignore[reportAttributeAccessIssue]
    best_of(engine, prompt, 4, lambda chain: 0.0, max_tokens=20)
    assert 3 + 2 * 4 - 2 <= most <= 3 + 2 * 4


def test_majority_is_the_most_frequent_answer(engine: Engine) -> None:
    chains = [
        Chain(i, (), text=text, ended=ended)
        for i, (text, ended) in enumerate(
            [("41", "length"), ("42", "stop"), (" 42 ", "stop"), ("41", "stopped"), ("no", "failed")]
        )
    ]
    assert Answers(tuple(chains)).majority() == "42"
    assert Answers(tuple(chains)).majority(lambda chain: chain.text.strip().startswith("4") or None) is True
    with pytest.raises(InferenceError, match="none of 5 chains"):
        Answers(tuple(chains)).majority(lambda chain: None)


def test_tools_are_called_and_their_answers_continue_the_chain(engine: Engine) -> None:
    """A character that the chain samples anyway ends a call. The tool's answer is part of the prompt from then on."""
    plain = best_of(engine, PROMPT, 1, max_tokens=24, sampling=SamplingOptions(1.0, seed=3)).best
    call = next(
        letter for at, letter in enumerate(plain.text) if letter.isascii() and plain.text.index(letter) == at > 2
    )
    calls: list[str] = []

    def look_up(text: str) -> str:
        calls.append(text)
        return "<42>"

    sampling = SamplingOptions(1.0, seed=3)
    chain = best_of(engine, PROMPT, 1, max_tokens=24, sampling=sampling, tools={call: look_up}, max_calls=1).best
    before = plain.text[: plain.text.index(call)]
    assert calls == [before]
    assert chain.text.startswith(f"{before}{call}<42>")
    assert chain.num_drawn == 24
    assert chain.ended == "length"
    tokens = (*engine.tokens_of(PROMPT), *chain.tokens)
    first = plain.tokens[: chain.tokens.index(engine.tokens_of("<")[0])]
    num_left = 24 - len(first)
    drawn = engine.submit(tokens[:-num_left], max_tokens=num_left, sampling=SamplingOptions(1.0, seed=3)).result()
    assert list(tokens[-num_left:]) == drawn.tokens, "the chain continues from the tool's answer"

    def broken(text: str) -> str:
        raise OSError("no index there")

    failed = best_of(engine, PROMPT, 1, max_tokens=24, sampling=sampling, tools={call: broken})
    assert isinstance(failed.chains[0].error, OSError)
    assert is_idle(engine)


def test_a_model_as_verifier(engine: Engine) -> None:
    """The score is the probability of one token after a question."""
    verify = asking(engine, lambda chain: f"Is {chain.text} right? ", yes="y")
    chain = Chain(0, (), text="42")
    found = engine.submit("Is 42 right? ", max_tokens=1, num_best=64).result()
    token = engine.tokens_of("y")[0]
    assert verify(chain) == pytest.approx(math.exp(dict(found.best[0])[token]), rel=1e-4)
    with pytest.raises(InferenceError, match="one token"):
        asking(engine, lambda chain: "", yes="yes")
    most, step = 0, engine.step

    def counted() -> bool:
        nonlocal most
        did_step = step()
        most = max(
            most,
            sum(each.scored_from is not None for each in engine._iterations.scheduler._admission.requests.values()),
        )
        return did_step

    engine.step = counted  # pyright: ignore[reportAttributeAccessIssue]
    answers = best_of(engine, PROMPT, 4, verify, max_tokens=4)
    assert most == 4, "all chains end at once, and their prompts are one batch"
    engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
    assert [chain.score for chain in answers.chains] == pytest.approx([verify(chain) for chain in answers.chains])
    too_long = best_of(engine, PROMPT, 2, asking(engine, lambda chain: "x" * 500, "y"), max_tokens=3)
    assert all(isinstance(chain.error, InferenceError) for chain in too_long.chains)
    assert is_idle(engine)


def remainders(chain: Chain) -> float:
    """A score that depends on the tokens so far."""
    return sum(token % 7 for token in chain.tokens) / max(1, len(chain.tokens))


def test_a_model_on_the_same_engine_stops_hopeless_chains(engine: Engine) -> None:
    """One of four slots is left to it, so its reviews come while chains run."""
    verify = asking(engine, lambda chain: chain.text[-6:] or "?", "y")
    answers = best_of(engine, PROMPT, 6, verify, budget=240, max_tokens=60)
    assert sum(chain.num_drawn for chain in answers.chains) <= 240 + 4 * OPTIONS.steps
    hopeless = [chain for chain in answers.chains if chain.ended == "hopeless"]
    assert len(hopeless) >= 2 and all(chain.reviews and chain.num_drawn < 60 for chain in hopeless)
    assert answers.best.score is not None and is_idle(engine)


def test_hopeless_chains_stop_early_under_a_budget(engine: Engine) -> None:
    """Each review keeps the better half. What is left has the tokens that it has without a budget."""
    n, budget, most = 4, 120, 60
    answers = best_of(engine, PROMPT, n, remainders, budget=budget, max_tokens=most)
    chains = answers.chains
    assert len(chains) == n and sum(chain.num_drawn for chain in chains) <= budget + n * OPTIONS.steps
    hopeless = [chain for chain in chains if chain.ended == "hopeless"]
    assert sorted(len(chain.reviews) for chain in hopeless) == [1, 1, 2]
    (best,) = [chain for chain in chains if chain.score is not None]
    assert answers.best is best and len(best.reviews) == 2
    for number in range(2):
        reviewed = [chain for chain in chains if len(chain.reviews) > number]
        kept = [chain.reviews[number][1] for chain in reviewed if len(chain.reviews) > number + 1 or chain is best]
        stopped = [chain.reviews[number][1] for chain in hopeless if len(chain.reviews) == number + 1]
        assert len(kept) == len(stopped) == 2 - number and max(stopped) <= min(kept)
    assert best.num_drawn > max(chain.num_drawn for chain in hopeless)
    free = best_of(engine, PROMPT, n, remainders, max_tokens=most).chains
    assert all(free[chain.number].tokens[: chain.num_drawn] == chain.tokens for chain in chains)
    assert is_idle(engine)


def test_a_budget_holds_for_more_chains_than_slots(engine: Engine) -> None:
    """Chains that wait for a slot begin when hopeless ones are stopped."""
    answers = best_of(engine, PROMPT, 10, remainders, budget=200, max_tokens=60)
    assert sum(chain.num_drawn for chain in answers.chains) <= 200 + 4 * OPTIONS.steps
    ended = Counter(chain.ended for chain in answers.chains)
    assert ended["hopeless"] >= 5 and answers.best.score is not None
    assert sum(chain.num_drawn > 0 for chain in answers.chains) >= 8
    first = best_of(engine, PROMPT, 2, remainders, budget=10, max_tokens=60, accept=-1.0)
    assert any(chain.score is not None for chain in first.chains) and is_idle(engine)
    broken = best_of(engine, PROMPT, 4, lambda chain: 1 / 0, budget=60, max_tokens=40)
    assert all(chain.score is None for chain in broken.chains) and is_idle(engine)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"n": 0}, "at least 1"),
        ({"n": 2, "sampling": SamplingOptions()}, "are equal"),
        ({"n": 2, "max_tokens": 500}, "at most 128"),
        ({"n": 2, "budget": 1}, "the budget is 1 tokens for 2 chains"),
    ],
)
def test_invalid_arguments_are_refused(engine: Engine, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InferenceError, match=why):
        best_of(engine, PROMPT, **options)
    assert is_idle(engine)
