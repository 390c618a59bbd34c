"""Test sampling and the verification of draft tokens.

Tokens have the frequencies that NumPy computes. A request gets the same tokens in any slot. If the vocabulary is split
over eight devices, the logits are not gathered.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from scipy import special, stats

from autopar.api.planned_function import Planned
from autopar.errors import InferenceError
from autopar.inference.step.penalties import adjusted, adjusted_after_drafts, counted
from autopar.inference.step.sampling import filter_logits, sample
from autopar.inference.step.sampling_params import SamplingOptions, SamplingParams, TokenCounts, params_of
from autopar.inference.step.thresholds import last_kept
from autopar.inference.step.verify_draft import verify
from autopar.xla_compiler import hlo_collectives as hlo

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def reset_random_numbers() -> None:
    """Each test draws the same numbers, in any order of tests."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


NUM, VOCABULARY = 8, 97  # candidates, tokens
SAMPLE = jax.jit(sample, static_argnames="num_candidates")
VERIFY = jax.jit(verify, static_argnames="num_candidates")


def params(*slots: SamplingOptions) -> SamplingParams:
    return params_of(slots)


def same_for_all(num: int, seeds: Any = None, **options: Any) -> SamplingParams:
    made = params_of([SamplingOptions(**options)] * num)
    return made if seeds is None else made._replace(seed=np.asarray(seeds, np.uint32))


def allowed(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """The probabilities of all tokens, by the definition of the parameters."""
    order = np.argsort(-logits, kind="stable")
    if options.temperature == 0:
        return np.eye(len(logits))[order[0]]
    ranked = logits[order].astype(np.float64) / options.temperature
    p = special.softmax(ranked)
    if options.top_k:
        p[options.top_k :] = 0
        p /= p.sum()
    if options.top_p < 1:
        before = np.cumsum(p) - p
        p[1:][before[1:] >= options.top_p] = 0
        p /= p.sum()
    p[p < options.min_p * p[0]] = 0
    p /= p.sum()
    found = np.zeros(len(logits))
    found[order] = p
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, NUM, NUM + 1, 30, VOCABULARY, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.013, 0.3, 1.0]),
    spread=st.sampled_from([0.5, 4.0]),
    has_ties=st.booleans(),
)
def test_filtered_logits_equal_numpy(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, has_ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((4, VOCABULARY))).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    options = SamplingOptions(temperature, top_k, top_p, min_p=min_p)
    found = FILTER(jnp.asarray(logits), params(*[options] * 4))
    for row, got in zip(logits, special.softmax(np.asarray(found.logits, np.float64), axis=-1), strict=True):
        expected = allowed(row, options)
        if not _is_near_threshold(row, options):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.log_total, special.logsumexp(logits.astype(np.float64), axis=-1), rtol=1e-5)


def test_ties_of_zeros_of_both_signs_go_by_index() -> None:
    logits = jnp.asarray([[-0.0, 1.0, 0.0, -0.0, 0.0]], jnp.float32)
    found = FILTER(logits, same_for_all(1, temperature=1.0, top_k=2))
    assert np.flatnonzero(np.isfinite(found.logits[0])).tolist() == [0, 1]


FILTER = jax.jit(lambda logits, params: filter_logits(logits, params, num_candidates=NUM))


def _is_near_threshold(logits: np.ndarray, options: SamplingOptions) -> bool:
    """Whether rounding decides if the nucleus has one more token."""
    if options.top_p == 1 or options.temperature == 0:
        return False
    p = np.sort(allowed(logits, SamplingOptions(options.temperature, options.top_k)))[::-1]
    return bool((np.abs(np.cumsum(p) - options.top_p) < 1e-5).any())


def test_the_last_token_kept_is_that_of_a_sort() -> None:
    """Also of equal logits, of infinite ones, and of both signs of 0."""
    logits = np.round(2 * RNG.standard_normal((40, VOCABULARY))).astype(np.float32)
    logits[::3, :50] = -np.inf
    logits[1::3] += RNG.standard_normal((13, VOCABULARY)).astype(np.float32)
    logits[logits == 0] = 0
    top_k = np.append(RNG.integers(1, VOCABULARY, 38), [0, 1]).astype(np.int32)
    order = np.argsort(-logits, axis=-1, kind="stable")
    scaled = logits - logits.max(-1, keepdims=True)
    for top_p in (1.0, 0.7):
        least, token = LAST_KEPT(logits, scaled, top_k, np.full(40, top_p, np.float32))
        for row in range(40):
            ranked = special.softmax(logits[row][order[row]].astype(np.float64))
            ranked[top_k[row] or VOCABULARY :] = 0
            last = (np.cumsum(ranked) - ranked < top_p * ranked.sum() - 1e-9)[: top_k[row] or VOCABULARY].sum() - 1
            if top_p == 1:
                last = (top_k[row] or VOCABULARY) - 1
            assert (least[row], token[row]) == (logits[row, order[row, last]], order[row, last])


LAST_KEPT = jax.jit(last_kept)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(1.0),
        SamplingOptions(0.7, top_k=5),
        SamplingOptions(1.0, top_p=0.8),
        SamplingOptions(1.5, top_k=6, top_p=0.7, min_p=0.1),
    ],
    ids=str,
)
def test_token_frequencies_equal_probabilities(options: SamplingOptions) -> None:
    """A chi-squared test over 20,000 seeds at one position, and over as many positions with one seed."""
    num, logits = 20_000, np.float32(2) * RNG.standard_normal(12).astype(np.float32)
    rows = jnp.broadcast_to(jnp.asarray(logits), (num, 12))
    many, one = np.arange(num), np.full(num, 7)
    given = params_of([options])
    for seeds, positions in ((many, one), (one, many)):
        wide = SamplingParams(*(np.repeat(each, num) for each in given))._replace(seed=seeds.astype(np.uint32))
        drawn = SAMPLE(rows, wide, jnp.asarray(positions, jnp.int32))
        assert bool(drawn.is_sound.all())
        check_frequencies(np.asarray(drawn.tokens), allowed(logits, options))


def check_frequencies(tokens: np.ndarray, probabilities: np.ndarray, least: float = 1e-3) -> None:
    """Assert that no token of probability 0 occurs, and that a chi-squared test of the others passes at level `least`."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = len(tokens) * probabilities
    many = expected >= 5
    observed = np.append(counts[many], counts[~many].sum())
    predicted = np.append(expected[many], expected[~many].sum())
    if predicted[-1] < 1:
        observed, predicted = observed[:-1], predicted[:-1] * observed[:-1].sum() / predicted[:-1].sum()
    assert stats.chisquare(observed, predicted).pvalue > least


def test_a_request_gets_the_same_tokens_in_any_slot_and_batch() -> None:
    logits = RNG.standard_normal((16, VOCABULARY)).astype(np.float32)
    mine = SamplingOptions(0.9, top_k=7, top_p=0.9, seed=42)
    others = [SamplingOptions(1.0, seed=i) if i % 2 else SamplingOptions() for i in range(16)]
    found = set()
    for slot in range(16):
        given = [*others[:slot], mine, *others[slot + 1 :]]
        rows = RNG.permutation(logits)
        rows[slot] = logits[0]
        positions = RNG.integers(0, 99, 16).astype(np.int32)
        positions[slot] = 5
        drawn = SAMPLE(rows, params(*given), positions)
        found.add((int(drawn.tokens[slot]), float(drawn.logprobs[slot])))
    assert len(found) == 1


def test_greedy_takes_the_first_of_equal_logits_and_logprobs_are_those_of_the_logits() -> None:
    logits = np.round(2 * RNG.standard_normal((5, VOCABULARY))).astype(np.float32)
    drawn = SAMPLE(logits, same_for_all(5), np.zeros(5, np.int32), num_candidates=NUM)
    np.testing.assert_array_equal(drawn.tokens, logits.argmax(-1))
    logprobs = special.log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(drawn.logprobs, logprobs.max(-1), rtol=1e-5)
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :NUM]
    np.testing.assert_array_equal(drawn.best_tokens, best)
    np.testing.assert_allclose(drawn.best_logprobs, np.take_along_axis(logprobs, best, -1), rtol=1e-5)


def test_non_finite_logits_are_reported_for_their_own_slot() -> None:
    logits = RNG.standard_normal((6, VOCABULARY)).astype(np.float32)
    logits[1, 3], logits[2, 96], logits[3], logits[4, :50] = np.nan, np.inf, -np.inf, -np.inf
    drawn = SAMPLE(logits, same_for_all(6, temperature=1.0), np.zeros(6, np.int32))
    assert drawn.is_sound.tolist() == [True, False, False, False, True, True]
    alone = SAMPLE(logits[5:], same_for_all(1, temperature=1.0), np.zeros(1, np.int32))
    assert drawn.tokens[5] == alone.tokens[0] and drawn.tokens[4] >= 50, "other slots are unaffected"


def test_biases_and_penalties_are_those_of_the_definition() -> None:
    """As in vLLM: the bias, the repetition penalty for the prompt and the output, then the others for the output."""
    num = 6
    logits = RNG.standard_normal((num + 1, VOCABULARY)).astype(np.float32)
    options = [
        SamplingOptions(),
        SamplingOptions(repetition_penalty=1.7),
        SamplingOptions(presence_penalty=0.5, frequency_penalty=-0.3),
        SamplingOptions(logit_bias={3: 7.5, VOCABULARY - 1: -100.0}),
        SamplingOptions(repetition_penalty=0.6, frequency_penalty=1.1, logit_bias={0: -2.0}),
        SamplingOptions(presence_penalty=-2.0),
    ]
    prompts, outputs = ([RNG.integers(0, 20, 9).tolist() for _ in options] for _ in range(2))
    rows = [TokenCounts.of(*each, VOCABULARY) for each in zip(options, prompts, outputs, strict=True)]
    state = jax.tree.map(lambda *each: jnp.stack(each), *rows)
    of_row = [*options, options[4]]  # a further row of slot 4, and one more token in slot 1
    state = COUNTED(state, np.array([1, num], np.int32), np.array([5, 6], np.int32))
    outputs[1].append(5)
    found = ADJUSTED(logits, state, np.array([4], np.int32), params(*of_row))
    given = zip(logits, of_row, [*prompts, prompts[4]], [*outputs, outputs[4]], strict=True)
    expected = [penalized(*each) for each in given]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found[0], logits[0])
    drafts = RNG.integers(0, 20, (num, 2)).astype(np.int32)
    several = RNG.standard_normal((num, 3, VOCABULARY)).astype(np.float32)
    after = AFTER_DRAFTS(several, state, drafts, params(*options))
    for slot, at in np.ndindex(num, 3):
        tokens = [*outputs[slot], *drafts[slot, :at]]
        np.testing.assert_allclose(
            after[slot, at], penalized(several[slot, at], options[slot], prompts[slot], tokens), rtol=1e-6, atol=1e-6
        )


def penalized(logits: np.ndarray, options: SamplingOptions, prompt: list[int], output: list[int]) -> np.ndarray:
    """Token by token, as the definition says."""
    changed = logits.astype(np.float64)
    for token, bias in options.logit_bias.items():
        changed[token] += bias
    for token in {*prompt, *output}:
        factor = options.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token in set(output):
        changed[token] -= options.frequency_penalty * output.count(token) + options.presence_penalty
    return changed


ADJUSTED, AFTER_DRAFTS, COUNTED = map(jax.jit, (adjusted, adjusted_after_drafts, counted))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5: give a number from 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has 1.0 for token -1"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias has inf for token 1"),
        ({"top_p": 0.0}, "top_p is 0.0: give a number above 0"),
        ({"seed": 2**32}, "seed is 4294967296"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InferenceError, match=why):
        SamplingOptions(**options)


# -- a vocabulary split over devices -----------------------------------------------------------

SLOTS, LARGE = 16, 8 * 2048


@pytest.mark.slow
@pytest.mark.contract
def test_a_split_vocabulary_is_never_gathered_and_draws_the_same() -> None:
    """Eight devices send their candidates, and a few numbers per slot."""
    logits = (3 * RNG.standard_normal((SLOTS, LARGE))).astype(np.float32)
    options = [
        SamplingOptions(t, k, p, seed=i)
        for i, (t, k, p) in enumerate([(0, 0, 1), (1, 0, 1), (0.8, 40, 1), (1, 0, 0.9), (1, 1000, 1), (2, 0, 0.99)] * 4)
    ][:SLOTS]
    arguments = (logits, params(*options), np.arange(SLOTS, dtype=np.int32))

    def step(logits: Any, *rest: Any) -> Any:
        return sample(logits, SamplingParams(*rest[:-1]), rest[-1])

    flat = (logits, *arguments[1], arguments[2])
    structs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in flat)
    planned = Planned.of(step, structs, {"mesh": "model=8", "pin": {"logits": P(None, "model")}})
    found = planned.run(*(jax.device_put(a, s) for a, s in zip(flat, planned.shardings, strict=True)))
    for got, expected in zip(jax.tree.leaves(found), SAMPLE(*arguments), strict=True):
        if np.issubdtype(np.asarray(expected).dtype, np.floating):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(got, expected)
    compiled = planned.run.lower(*structs).compile().as_text() or ""
    sent = hlo.collectives(compiled, ignore_up_to=SLOTS)
    assert max(one.num_elements for one in sent) <= SLOTS * 8 * 64, "the candidates of each device"
    assert sum(one.num_elements > SLOTS * 8 for one in sent) == 2, "their values and indices, once"
    assert len(sent) <= 6, [(one.kind, one.num_elements) for one in sent]


# -- speculation -------------------------------------------------------------------------------


def test_greedy_accepts_what_greedy_would_have_generated() -> None:
    logits = RNG.standard_normal((4, 4, VOCABULARY)).astype(np.float32)
    best = logits.argmax(-1).astype(np.int32)
    proposed = best[:, :3].copy()
    proposed[1, 0] += 1
    proposed[2, 2] = (proposed[2, 2] + 1) % VOCABULARY
    num = np.array([3, 3, 3, 1], np.int32)
    found = VERIFY(logits, proposed % VOCABULARY, num, same_for_all(4), np.zeros(4, np.int32))
    assert found.num_accepted.tolist() == [3, 0, 2, 1]
    for row, count in enumerate([3, 0, 2, 1]):
        assert found.tokens[row, : count + 1].tolist() == best[row, : count + 1].tolist()
        assert not found.tokens[row, count + 1 :].any()
    logprobs = special.log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(
        found.logprobs[0], np.take_along_axis(logprobs[0], best[0][:, None], -1)[:, 0], rtol=1e-5
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}], ids=str)
@pytest.mark.parametrize("by", ["certainty", "draft"])
def test_verified_tokens_have_the_target_distribution_for_any_draft(by: str, options: dict[str, Any]) -> None:
    """With 100,000 seeds and ten tokens, this holds for the first token, and for the second after an accepted one."""
    num, size = 100_000, 10
    logits = RNG.standard_normal((2, size)).astype(np.float32)
    q = special.softmax(1.5 * RNG.standard_normal(size)).astype(np.float32)
    proposed = (
        RNG.choice(size, num, p=q / q.sum(dtype=np.float64)) if by == "draft" else np.full(num, logits[0].argmax())
    )
    draft = jnp.broadcast_to(jnp.asarray(q), (num, 1, size)) if by == "draft" else None
    found = VERIFY(
        jnp.broadcast_to(jnp.asarray(logits), (num, 2, size)),
        proposed[:, None].astype(np.int32),
        np.ones(num, np.int32),
        same_for_all(num, np.arange(num), **options),
        np.full(num, 11, np.int32),
        draft,
    )
    first = allowed(logits[0], SamplingOptions(**options))
    tokens, accepted = np.asarray(found.tokens), np.asarray(found.num_accepted)
    check_frequencies(tokens[:, 0], first)
    check_frequencies(tokens[accepted == 1, 1], allowed(logits[1], SamplingOptions(**options)))
    frequencies = np.bincount(tokens[:, 0], minlength=size) / num
    assert 0.5 * np.abs(frequencies - first).sum() <= 0.01, "total variation"
    rate = np.minimum(first, q).sum() if by == "draft" else first.max()
    assert accepted.mean() == pytest.approx(rate, abs=0.01)


def test_a_slot_without_draft_tokens_is_sampled_and_only_the_logits_it_reads_must_be_finite() -> None:
    logits = RNG.standard_normal((2, 3, VOCABULARY)).astype(np.float32)
    logits[0, 1:] = np.nan
    logits[1, 0, 5] = np.nan
    found = VERIFY(logits, np.zeros((2, 2), np.int32), np.zeros(2, np.int32), same_for_all(2), np.zeros(2, np.int32))
    assert found.is_sound.tolist() == [True, False]
    assert found.num_accepted.tolist() == [0, 0] and found.tokens[0, 0] == logits[0, 0].argmax()


@pytest.mark.slow
def test_verification_never_gathers_a_split_vocabulary() -> None:
    """As in sampling, candidates and a few numbers are sent for each slot and draft token."""
    slots, width, size = 8, 4, 8 * 512
    logits = (3 * RNG.standard_normal((slots, width, size))).astype(np.float32)
    proposed = logits.argmax(-1)[:, :-1].astype(np.int32)
    proposed[::2, 1] = 5
    options = params(
        *(SamplingOptions(t, k, seed=i) for i, (t, k) in enumerate([(0, 0), (0.05, 0), (0.1, 9), (1, 0)] * 2))
    )
    flat = (logits, proposed, np.full(slots, width - 1, np.int32), *options, np.arange(slots, dtype=np.int32))

    def step(logits: Any, proposed: Any, num: Any, *rest: Any) -> Any:
        return verify(logits, proposed, num, SamplingParams(*rest[:-1]), rest[-1])

    structs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in flat)
    planned = Planned.of(step, structs, {"mesh": "model=8", "pin": {"logits": P(None, None, "model")}})
    found = planned.run(*(jax.device_put(a, s) for a, s in zip(flat, planned.shardings, strict=True)))
    expected = VERIFY(*flat[:3], options, flat[-1])
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.num_accepted, expected.num_accepted)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    sent = hlo.collectives(planned.run.lower(*structs).compile().as_text() or "", ignore_up_to=0)
    assert max(one.num_elements for one in sent) <= slots * width * size / 8, "at most the part of one device"
