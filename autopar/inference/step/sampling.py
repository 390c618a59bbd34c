"""Sample the next token of each slot from its logits: temperature, top-k, top-p, min-p.

In: logits `[slots, vocabulary]`, and the sampling parameters of each slot. Out: tokens and their logprobs. These are pure
functions of arrays, which the planner splits like any others. If the vocabulary is split, each device sends its largest
logits, its sums and its maxima, but never all of its logits.

A slot's token depends only on its logits, parameters, seed and position: the noise is a function of (seed, position). So
a request gets the same tokens in any slot, in any batch, and after preemption.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.inference.step.sampling_params import SamplingParams
from autopar.inference.step.thresholds import last_kept

#: The number of most probable tokens that are found for each token. A larger `top_k` or nucleus takes further reductions.
NUM_CANDIDATES = 64


class Sampled(NamedTuple):
    """The sampled tokens of all slots.

    Args:
        tokens: int32 `[slots]`.
        logprobs: f32 `[slots]`, of the tokens, by the softmax of the logits without temperature, `top_k` or `top_p`.
        best_tokens, best_logprobs: `[slots, candidates]`, the most probable tokens in order.
        is_sound: bool `[slots]`; False if a logit is NaN or infinite, or all are masked. The token is then meaningless.
    """

    tokens: jax.Array
    logprobs: jax.Array
    best_tokens: jax.Array
    best_logprobs: jax.Array
    is_sound: jax.Array


class FilteredLogits(NamedTuple):
    """The logits to sample from.

    Args:
        logits: f32 `[slots, vocabulary]`, divided by the temperature; `-inf` for tokens that are filtered out.
        best, best_tokens: `[slots, candidates]`, the largest input logits and their tokens, in order.
        log_total: f32 `[slots]`, the log-sum-exp of the input logits.
    """

    logits: jax.Array
    best: jax.Array
    best_tokens: jax.Array
    log_total: jax.Array


def sample(
    logits: jax.Array, params: SamplingParams, positions: jax.Array, *, num_candidates: int = NUM_CANDIDATES
) -> Sampled:
    """Sample one token for each slot.

    Args:
        logits: `[slots, vocabulary]`.
        positions: int32 `[slots]`, the positions of the sampled tokens in their sequences.
        num_candidates: the number of most probable tokens in the result; static.
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
    )


def filter_logits(logits: jax.Array, params: SamplingParams, *, num_candidates: int = NUM_CANDIDATES) -> FilteredLogits:
    """Apply temperature, `top_k`, `top_p` and `min_p`, in this order.

    The tokens that are kept are a prefix of the sorted tokens. So a comparison with the last one kept decides for each
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
    scaled = (logits - top) * scale
    num_kept, has_more = _num_kept((best - top) * scale, jnp.exp(scaled).sum(-1), params)
    keeps_all = (num_kept == 0) & ~is_greedy
    last = jnp.maximum(jnp.where(is_greedy, 1, num_kept) - 1, 0)[:, None]
    least, least_token = (jnp.take_along_axis(each, last, -1)[:, 0] for each in (best, best_tokens))
    if num < logits.shape[-1]:
        has_more &= ~is_greedy

        def among_all() -> tuple[jax.Array, jax.Array]:
            found = last_kept(logits, scaled, params.top_k, params.top_p)
            return jnp.where(has_more, found[0], least), jnp.where(has_more, found[1], least_token)

        least, least_token = lax.cond(has_more.any(), among_all, lambda: (least, least_token))
    tokens = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_least = (logits == least[:, None]) & (tokens <= least_token[:, None])
    is_kept = keeps_all[:, None] | (logits > least[:, None]) | is_least
    is_kept &= scaled >= jnp.log(params.min_p)[:, None]
    log_total = jnp.log(jnp.exp(logits - top).sum(-1)) + top[:, 0]
    return FilteredLogits(jnp.where(is_kept, scaled, -jnp.inf), best, best_tokens, log_total)


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
    """The number of candidates to sample from, 0 for all tokens; and whether more tokens are needed than candidates.

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
    has_more = (params.top_k > num) | (has_p & (by_k == 0) & (mass.sum(-1) < params.top_p * total))
    return jnp.where(has_p, by_p, by_k), has_more
