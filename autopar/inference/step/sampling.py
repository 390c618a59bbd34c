"""The next token of each slot: from logits, by what each request asks for.

In: logits `[slots, vocabulary]`, and one number of each parameter for each slot. Out: tokens and their logprobs. Pure
functions of arrays, that the planner splits like any others. Of a vocabulary that is split, each device sends the
largest logits of its own part, sums and maxima; never the logits.

What a slot gets depends on its logits, its parameters, its seed and the position alone: noise is drawn for each
(seed, position), so a request's tokens are the same in any slot, beside any others, and computed again.
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

#: Logits that are kept of a slot with `top_k` or `top_p`, at most.
NUM_CANDIDATES = 64


class SamplingParams(NamedTuple):
    """What each request asks for, `[slots]` each.

    Args:
        temperature: f32; 0 takes the token of the largest logit, of equal ones the first.
        top_k: int32; only so many of the largest logits are drawn from; 0 for all. At most the number of candidates.
        top_p: f32; of these only the largest whose probabilities, at this temperature, sum up to it, at least one; 1
            for all. Of more than the number of candidates, only the largest so many.
        seed: uint32.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The same, of one request, checked.

    Args:
        num_candidates: of the program it is for.

    Raises:
        InferenceError: one of them cannot be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_candidates: int = NUM_CANDIDATES

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InferenceError(f"temperature is {self.temperature}: 0 for the most probable token, or larger")
        if not 0 <= self.top_k <= self.num_candidates:
            raise InferenceError(
                f"top_k is {self.top_k}: at least 1 and at most {self.num_candidates}, the candidates that are kept of "
                "each slot, or 0 for all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise InferenceError(f"top_p is {self.top_p}: larger than 0, and 1 for all tokens")
        if not 0 <= self.seed < 2**32:
            raise InferenceError(f"seed is {self.seed}: at least 0 and less than 2**32")


def params_of(slots: Sequence[SamplingOptions | None]) -> SamplingParams:
    """What each slot asks for as arrays on the host; of an empty slot, as by default."""
    each = [options or SamplingOptions() for options in slots]
    return SamplingParams(
        np.array([options.temperature for options in each], np.float32),
        np.array([options.top_k for options in each], np.int32),
        np.array([options.top_p for options in each], np.float32),
        np.array([options.seed for options in each], np.uint32),
    )


class Sampled(NamedTuple):
    """What came out, of each slot.

    Args:
        tokens: int32 `[slots]`.
        logprobs: f32 `[slots]`, of these, of the distribution that the logits give before any parameter.
        best_tokens, best_logprobs: `[slots, candidates]`, the most probable ones in order.
        is_sound: bool `[slots]`; False where a logit is NaN or infinite or all are masked: then no token is of worth.
        is_cut: bool `[slots]`; `top_p` asked for more tokens than there are candidates.
    """

    tokens: jax.Array
    logprobs: jax.Array
    best_tokens: jax.Array
    best_logprobs: jax.Array
    is_sound: jax.Array
    is_cut: jax.Array


class Kept(NamedTuple):
    """What may be drawn: scaled logits, `-inf` where not.

    Args:
        logits: f32 `[slots, vocabulary]`.
        best, best_tokens: `[slots, candidates]`, the largest given logits and their tokens, in order.
        log_total: f32 `[slots]`, the logarithm of the sum of the exponentials of the given logits.
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
    """One token for each slot.

    Args:
        logits: `[slots, vocabulary]`.
        positions: int32 `[slots]`, of the tokens that are drawn, in their sequences.
        num_candidates: static.
    """
    found = kept(logits, params, num_candidates=num_candidates)
    likeliest = found.best_tokens[:, 0]

    def drawn() -> jax.Array:
        # Behind a barrier: within the search for the largest, XLA's CPU compiler makes noise one number at a time.
        noisy = lax.optimization_barrier(found.logits + gumbel(params.seed, positions, logits.shape[-1]))
        return jnp.where(params.temperature > 0, jnp.argmax(noisy, -1).astype(jnp.int32), likeliest)

    # Noise for a whole vocabulary takes longer than all else here, and often nobody draws.
    tokens = lax.cond((params.temperature > 0).any(), drawn, lambda: likeliest)
    chosen = jnp.take_along_axis(logits.astype(jnp.float32), tokens[:, None], -1)[:, 0]
    return Sampled(
        tokens,
        chosen - found.log_total,
        found.best_tokens,
        found.best - found.log_total[:, None],
        jnp.isfinite(found.log_total),
        found.is_cut,
    )


def kept(logits: jax.Array, params: SamplingParams, *, num_candidates: int = NUM_CANDIDATES) -> Kept:
    """The logits that temperature, `top_k` and `top_p` leave to be drawn from, in this order.

    The kept are the first so many of the candidates, so the last of these says of each token whether it is: by its
    logit, and of equal ones by its place, as `lax.top_k` has ordered them.
    """
    logits = logits.astype(jnp.float32)
    num = min(num_candidates, logits.shape[-1])
    # Behind a barrier: of a top-k that is cut again XLA's CPU compiler makes a full sort, 60 times as slow.
    best, best_tokens = lax.optimization_barrier(lax.top_k(logits, num))
    best_tokens = best_tokens.astype(jnp.int32)
    is_greedy = params.temperature <= 0
    scale = jnp.where(is_greedy, 1.0, 1.0 / jnp.where(is_greedy, 1.0, params.temperature))[:, None]
    top = best[:, :1]
    top = jnp.where(jnp.isfinite(top), top, 0.0)  # so that what is no number stays none
    num_kept, is_cut = _num_kept((best - top) * scale, jnp.exp((logits - top) * scale).sum(-1), params)
    keeps_all = (num_kept == 0) & ~is_greedy
    last = jnp.maximum(jnp.where(is_greedy, 1, num_kept) - 1, 0)[:, None]
    least, least_token = (jnp.take_along_axis(each, last, -1) for each in (best, best_tokens))
    tokens = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_kept = keeps_all[:, None] | (logits > least) | ((logits == least) & (tokens <= least_token))
    log_total = jnp.log(jnp.exp(logits - top).sum(-1)) + top[:, 0]
    scaled = jnp.where(is_kept, (logits - top) * scale, -jnp.inf)
    return Kept(scaled, best, best_tokens, log_total, is_cut & ~is_greedy)


def gumbel(seed: Any, positions: jax.Array, vocabulary: int, purpose: int = 0) -> jax.Array:
    """Noise `[slots, vocabulary]`, whose largest sum with logits is a draw from their distribution.

    Args:
        purpose: tells draws for one position from each other.
    """
    keys = keys_of(seed, positions, purpose)
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,), jnp.float32))(keys)


def keys_of(seed: Any, positions: jax.Array, purpose: int = 0) -> jax.Array:
    """One key for each pair of seed and position."""

    def key_of(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)

    return jax.vmap(key_of)(seed, positions)


def _num_kept(best: jax.Array, total: jax.Array, params: SamplingParams) -> tuple[jax.Array, jax.Array]:
    """How many of the candidates may be drawn, 0 for all tokens; whether more should be.

    Args:
        best: `[slots, candidates]`, scaled logits less the largest.
        total: `[slots]`, the sum of the exponentials of all such.
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
