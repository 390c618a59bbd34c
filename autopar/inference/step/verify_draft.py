"""Verify draft tokens by rejection sampling, which preserves the target model's distribution (speculative decoding).

In: the target model's logits after each draft token, and the draft tokens. Out: the number of accepted tokens, and one more
token. A draft token `x` that was drawn with probability `q(x)` is accepted with probability `min(1, p(x) / q(x))`. The first
rejected token is resampled from `max(p - q, 0)`. Then every token is distributed as `p`, for any `q` (Leviathan et al.
2023).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from autopar.inference.step.sampling import NUM_CANDIDATES, filter_logits, gumbel, keys_of
from autopar.inference.step.sampling_params import SamplingParams

_ACCEPT, _DRAW = 1, 2  # purposes of the noise


class Verified(NamedTuple):
    """The result of verification for all slots.

    Args:
        num_accepted: int32 `[slots]`, the number of accepted draft tokens.
        tokens: int32 `[slots, proposals + 1]`, of which the first `num_accepted + 1` are new; the rest are 0.
        logprobs: f32, of the tokens, by the softmax of the logits without sampling parameters.
        is_sound: bool `[slots]`, as in `Sampled`.
    """

    num_accepted: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    is_sound: jax.Array


def verify(
    logits: jax.Array,
    proposed: jax.Array,
    num_proposed: jax.Array,
    params: SamplingParams,
    positions: jax.Array,
    draft: jax.Array | None = None,
    *,
    num_candidates: int = NUM_CANDIDATES,
) -> Verified:
    """Accept draft tokens, and sample one more token.

    Args:
        logits: `[slots, proposals + 1, vocabulary]`, the target model's logits after the last known token and after each
            draft token.
        proposed: int32 `[slots, proposals]`, the draft tokens.
        num_proposed: int32 `[slots]`, the number of valid draft tokens.
        positions: int32 `[slots]`, the position of the first new token.
        draft: f32 `[slots, proposals, vocabulary]`, the probabilities that the draft tokens were sampled with, after the
            draft model's temperature; None if they were not sampled, and `q` is 1.
    """
    slots, width, vocabulary = logits.shape
    rows = SamplingParams(*(jnp.repeat(each, width) for each in params))
    filtered = filter_logits(logits.reshape(slots * width, vocabulary), rows, num_candidates=num_candidates)
    target = jax.nn.softmax(filtered.logits, -1).reshape(logits.shape)
    accepted = _is_accepted(target, proposed, params.seed, positions[:, None] + jnp.arange(width), draft)
    accepted &= jnp.arange(width - 1) < num_proposed[:, None]
    num_accepted = jnp.cumprod(accepted.astype(jnp.int32), -1).sum(-1)
    was_rejected = num_accepted < num_proposed
    last = _last_token(target, proposed, num_accepted, was_rejected, params.seed, positions, draft)
    tokens = jnp.concatenate([proposed, jnp.zeros((slots, 1), proposed.dtype)], -1).astype(jnp.int32)
    ranks = jnp.arange(width)
    tokens = jnp.where(
        ranks < num_accepted[:, None], tokens, jnp.where(ranks == num_accepted[:, None], last[:, None], 0)
    )
    log_total = filtered.log_total.reshape(slots, width)
    chosen = jnp.take_along_axis(logits.astype(jnp.float32), tokens[..., None], -1)[..., 0]
    is_read = ranks <= num_accepted[:, None]
    is_sound = jnp.all(jnp.isfinite(log_total) | ~is_read, -1)
    return Verified(num_accepted, tokens, chosen - log_total, is_sound)


def _is_accepted(
    target: jax.Array, proposed: jax.Array, seed: jax.Array, positions: jax.Array, draft: jax.Array | None
) -> jax.Array:
    """Whether each draft token passes its own test, bool `[slots, proposals]`."""
    index = proposed[..., None]
    p = jnp.take_along_axis(target[:, :-1], index, -1)[..., 0]
    q = jnp.ones_like(p) if draft is None else jnp.take_along_axis(draft, index, -1)[..., 0]
    slots, num = proposed.shape
    keys = keys_of(jnp.repeat(seed, num), positions[:, :-1].reshape(-1), _ACCEPT)
    draws = jax.vmap(jax.random.uniform)(keys).reshape(slots, num)
    return draws * q < p


def _last_token(
    target: jax.Array,
    proposed: jax.Array,
    num_accepted: jax.Array,
    was_rejected: jax.Array,
    seed: jax.Array,
    positions: jax.Array,
    draft: jax.Array | None,
) -> jax.Array:
    """Sample the token after the accepted ones: from the residual `max(p - q, 0)` after a rejection, else from `p`."""
    vocabulary = target.shape[-1]
    index = num_accepted[:, None]
    p = jnp.take_along_axis(target, index[..., None], 1)[:, 0]
    rejected = jnp.minimum(index, proposed.shape[1] - 1)
    if draft is None:
        tokens = jnp.arange(vocabulary)
        q = (tokens == jnp.take_along_axis(proposed, rejected, 1)).astype(p.dtype)
    else:
        q = jnp.take_along_axis(draft, rejected[..., None], 1)[:, 0]
    residual = jnp.where(was_rejected[:, None], jnp.maximum(p - q, 0.0), p)
    noise = gumbel(seed, positions + num_accepted, vocabulary, _DRAW)
    return jnp.argmax(jnp.where(residual > 0, jnp.log(residual), -jnp.inf) + noise, -1).astype(jnp.int32)
