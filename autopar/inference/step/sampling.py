"""Sample the next token of each slot from its logits: temperature, top-k, top-p.

In: logits `[slots, vocabulary]`, and the sampling parameters of each slot. Out: tokens and their logprobs. These are pure
functions of arrays, which the planner splits like any others. If the vocabulary is split, each device sends its largest
logits, its sums and its maxima, but never all of its logits.

A slot's token depends only on its logits, parameters, seed and position: the noise is a function of (seed, position). So
a request gets the same tokens in any slot, in any batch, and after preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.errors import InferenceError

#: The largest number of tokens that `top_k` or `top_p` can keep.
NUM_CANDIDATES = 64


class SamplingParams(NamedTuple):
    """The sampling parameters of all slots, `[slots]` each.

    Args:
        temperature: f32; 0 selects the largest logit, and the first of equal ones.
        top_k: int32, the number of largest logits to sample from, at most the number of candidates; 0 for all tokens.
        top_p: f32, the mass of the nucleus: the fewest most probable tokens whose probabilities, after temperature and
            `top_k`, reach it; 1 for all tokens. A nucleus of more tokens than candidates is cut.
        seed: uint32.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The sampling parameters of one request, checked.

    Args:
        temperature: 0 for greedy decoding, or larger.
        top_k: the number of most probable tokens to sample from; 0 for all.
        top_p: the probability mass to sample from (nucleus sampling); 1 for all.
        seed: the seed of the noise, an unsigned 32-bit integer.
        num_candidates: the largest `top_k` of the program.

    Raises:
        InferenceError: a parameter is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_candidates: int = NUM_CANDIDATES

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InferenceError(
                f"temperature is {self.temperature}: give 0 for the most probable token, or a larger finite number"
            )
        if not 0 <= self.top_k <= self.num_candidates:
            raise InferenceError(f"top_k is {self.top_k}: give 1 to {self.num_candidates}, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise InferenceError(f"top_p is {self.top_p}: give a number above 0 and at most 1, which allows all tokens")
        if not 0 <= self.seed < 2**32:
            raise InferenceError(f"seed is {self.seed}: give an integer from 0 to 2**32 - 1")


def params_of(slots: Sequence[SamplingOptions | None]) -> SamplingParams:
    """Stack the parameters of all slots into host arrays; empty slots get the defaults."""
    each = [options or SamplingOptions() for options in slots]
    return SamplingParams(
        np.array([options.temperature for options in each], np.float32),
        np.array([options.top_k for options in each], np.int32),
        np.array([options.top_p for options in each], np.float32),
        np.array([options.seed for options in each], np.uint32),
    )


class Sampled(NamedTuple):
    """The sampled tokens of all slots.

    Args:
        tokens: int32 `[slots]`.
        logprobs: f32 `[slots]`, of the tokens, by the softmax of the logits without temperature, `top_k` or `top_p`.
        best_tokens, best_logprobs: `[slots, candidates]`, the most probable tokens in order.
        is_sound: bool `[slots]`; False if a logit is NaN or infinite, or all are masked. The token is then meaningless.
        is_cut: bool `[slots]`; whether `top_p` was cut at the number of candidates.
    """

    tokens: jax.Array
    logprobs: jax.Array
    best_tokens: jax.Array
    best_logprobs: jax.Array
    is_sound: jax.Array
    is_cut: jax.Array


class FilteredLogits(NamedTuple):
    """The logits to sample from.

    Args:
        logits: f32 `[slots, vocabulary]`, divided by the temperature; `-inf` for tokens that are filtered out.
        best, best_tokens: `[slots, candidates]`, the largest input logits and their tokens, in order.
        log_total: f32 `[slots]`, the log-sum-exp of the input logits.
        is_cut: as in `Sampled`.
    """

    logits: jax.Array
    best: jax.Array
    best_tokens: jax.Array
    log_total: jax.Array
    is_cut: jax.Array


def sample(
    logits: jax.Array, params: SamplingParams, positions: jax.Array, *, num_candidates: int = NUM_CANDIDATES
) -> Sampled:
    """Sample one token for each slot.

    Args:
        logits: `[slots, vocabulary]`.
        positions: int32 `[slots]`, the positions of the sampled tokens in their sequences.
        num_candidates: the largest number of tokens that `top_k` or `top_p` can keep; static.
    """
    filtered = filter_logits(logits, params, num_candidates=num_candidates)
    greedy = filtered.best_tokens[:, 0]

    def drawn() -> jax.Array:
        # The barrier keeps XLA's CPU compiler from fusing the noise into the argmax, where it is generated one by one.
        noisy = lax.optimization_barrier(filtered.logits + gumbel(params.seed, positions, logits.shape[-1]))
        return jnp.where(params.temperature > 0, jnp.argmax(noisy, -1).astype(jnp.int32), greedy)

    # Noise for a whole vocabulary takes longer than the rest of sampling, and often all slots are greedy.
    tokens = lax.cond((params.temperature > 0).any(), drawn, lambda: greedy)
    chosen = jnp.take_along_axis(logits.astype(jnp.float32), tokens[:, None], -1)[:, 0]
    return Sampled(
        tokens,
        chosen - filtered.log_total,
        filtered.best_tokens,
        filtered.best - filtered.log_total[:, None],
        jnp.isfinite(filtered.log_total),
        filtered.is_cut,
    )


def filter_logits(logits: jax.Array, params: SamplingParams, *, num_candidates: int = NUM_CANDIDATES) -> FilteredLogits:
    """Apply temperature, `top_k` and `top_p`, in this order.

    The tokens that are kept are a prefix of the sorted candidates. So a comparison with the last one kept decides for each
    token: by its logit, and for equal logits by its index, which is the order of `lax.top_k`.
    """
    # `lax.top_k` takes 0 before -0, which are equal in comparisons.
    logits = jnp.where(logits == 0, 0.0, logits.astype(jnp.float32))
    num = min(num_candidates, logits.shape[-1])
    # Without the barrier, XLA's CPU compiler turns a sliced top-k into a full sort, which is 60 times as slow.
    best, best_tokens = lax.optimization_barrier(lax.top_k(logits, num))
    best_tokens = best_tokens.astype(jnp.int32)
    is_greedy = params.temperature <= 0
    scale = jnp.where(is_greedy, 1.0, 1.0 / jnp.where(is_greedy, 1.0, params.temperature))[:, None]
    top = best[:, :1]
    top = jnp.where(jnp.isfinite(top), top, 0.0)  # keeps non-finite logits non-finite
    num_kept, is_cut = _num_kept((best - top) * scale, jnp.exp((logits - top) * scale).sum(-1), params)
    keeps_all = (num_kept == 0) & ~is_greedy
    last = jnp.maximum(jnp.where(is_greedy, 1, num_kept) - 1, 0)[:, None]
    least, least_token = (jnp.take_along_axis(each, last, -1) for each in (best, best_tokens))
    tokens = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_kept = keeps_all[:, None] | (logits > least) | ((logits == least) & (tokens <= least_token))
    log_total = jnp.log(jnp.exp(logits - top).sum(-1)) + top[:, 0]
    scaled = jnp.where(is_kept, (logits - top) * scale, -jnp.inf)
    return FilteredLogits(scaled, best, best_tokens, log_total, is_cut & ~is_greedy)


#: The number of tokens in a word of a mask.
WORD = 32


def num_words(vocabulary: int) -> int:
    """The number of words of a mask of tokens."""
    return -(-vocabulary // WORD)


def only_allowed(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Replace the logits of tokens that are not allowed by `-inf`.

    Args:
        logits: `[..., vocabulary]`.
        allowed: int32 `[..., words]`, a bit for each token, the lowest bit of a word first; all bits set allows all.
    """
    bits = (allowed[..., None] >> jnp.arange(WORD, dtype=jnp.int32)) & 1
    is_allowed = bits.reshape(*allowed.shape[:-1], -1)[..., : logits.shape[-1]] != 0
    return jnp.where(is_allowed, logits, -jnp.inf)


def gumbel(seed: Any, positions: jax.Array, vocabulary: int, purpose: int = 0) -> jax.Array:
    """Gumbel noise `[slots, vocabulary]`: the argmax of logits plus noise is a sample from their softmax.

    Args:
        purpose: a number that makes independent draws for the same position.
    """
    keys = keys_of(seed, positions, purpose)
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,), jnp.float32))(keys)


def keys_of(seed: Any, positions: jax.Array, purpose: int = 0) -> jax.Array:
    """One random key for each pair of seed and position."""

    def key_of(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)

    return jax.vmap(key_of)(seed, positions)


def _num_kept(best: jax.Array, total: jax.Array, params: SamplingParams) -> tuple[jax.Array, jax.Array]:
    """The number of candidates to sample from, 0 for all tokens; and whether `top_p` was cut at the candidates.

    Args:
        best: `[slots, candidates]`, the candidates' scaled logits minus the largest.
        total: `[slots]`, the sum of the exponentials of all scaled logits minus the largest.
    """
    num = best.shape[-1]
    by_k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, num), 0)
    rank = lax.broadcasted_iota(jnp.int32, best.shape, 1)
    mass = jnp.where((by_k == 0)[:, None] | (rank < by_k[:, None]), jnp.exp(best), 0.0)
    total = jnp.where(by_k > 0, mass.sum(-1), total)
    before = jnp.cumsum(mass, -1) - mass
    by_p = jnp.maximum((before < params.top_p[:, None] * total[:, None]).sum(-1), 1)
    by_p = jnp.where(by_k > 0, jnp.minimum(by_p, by_k), by_p)
    has_p = params.top_p < 1
    is_cut = has_p & (by_k == 0) & (mass.sum(-1) < params.top_p * total)
    return jnp.where(has_p, by_p, by_k), is_cut
