"""Proposed tokens held against what the model says: accepted so that the distribution stays the model's own.

In: the logits that follow each proposed token, and the proposals. Out: how many of them hold, and one token more. By
rejection: proposal `x`, proposed with probability `q(x)`, is accepted with probability `min(1, p(x) / q(x))`; the first
that is not is drawn anew from `max(p - q, 0)`. Then each token is one of `p`, whatever `q` was (Leviathan et al. 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from autopar.inference.step.sampling import NUM_CANDIDATES, SamplingParams, gumbel, kept, keys_of

_ACCEPT, _DRAW = 1, 2  # purposes of noise


class Verified(NamedTuple):
    """What came out, of each slot.

    Args:
        num_accepted: int32 `[slots]`.
        tokens: int32 `[slots, proposals + 1]`, of which the first `num_accepted + 1` are new; the rest are 0.
        logprobs: f32, of these, of the distribution that the logits give.
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
    """Accept proposals, and draw one token more.

    Args:
        logits: `[slots, proposals + 1, vocabulary]`: what follows the last known token, and each proposal.
        proposed: int32 `[slots, proposals]`. num_proposed: int32 `[slots]`, so many of them count.
        positions: int32 `[slots]`, of the first token that is new.
        draft: f32 `[slots, proposals, vocabulary]`, the probabilities they were drawn with, after the draft model's own
            temperature; None where nothing was drawn, and each is proposed with certainty.
    """
    slots, width, vocabulary = logits.shape
    rows = SamplingParams(*(jnp.repeat(each, width) for each in params))
    found = kept(logits.reshape(slots * width, vocabulary), rows, num_candidates=num_candidates)
    target = jax.nn.softmax(found.logits, -1).reshape(logits.shape)
    places = positions[:, None] + jnp.arange(width)
    accepted = _is_accepted(target, proposed, params.seed, places, draft)
    accepted &= jnp.arange(width - 1) < num_proposed[:, None]
    num_accepted = jnp.cumprod(accepted.astype(jnp.int32), -1).sum(-1)
    was_rejected = num_accepted < num_proposed
    last = _last_token(target, proposed, num_accepted, was_rejected, params.seed, positions, draft)
    tokens = jnp.concatenate([proposed, jnp.zeros((slots, 1), proposed.dtype)], -1).astype(jnp.int32)
    ranks = jnp.arange(width)
    tokens = jnp.where(
        ranks < num_accepted[:, None], tokens, jnp.where(ranks == num_accepted[:, None], last[:, None], 0)
    )
    log_total = found.log_total.reshape(slots, width)
    chosen = jnp.take_along_axis(logits.astype(jnp.float32), tokens[..., None], -1)[..., 0]
    is_read = ranks <= num_accepted[:, None]
    is_sound = jnp.all(jnp.isfinite(log_total) | ~is_read, -1)
    return Verified(num_accepted, tokens, chosen - log_total, is_sound)


def _is_accepted(
    target: jax.Array, proposed: jax.Array, seed: jax.Array, places: jax.Array, draft: jax.Array | None
) -> jax.Array:
    """bool `[slots, proposals]`."""
    at = proposed[..., None]
    p = jnp.take_along_axis(target[:, :-1], at, -1)[..., 0]
    q = jnp.ones_like(p) if draft is None else jnp.take_along_axis(draft, at, -1)[..., 0]
    slots, num = proposed.shape
    keys = keys_of(jnp.repeat(seed, num), places[:, :-1].reshape(-1), _ACCEPT)
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
    """The token after those accepted: after a rejection of what the proposal had too little of, else of the target."""
    vocabulary = target.shape[-1]
    at = num_accepted[:, None]
    p = jnp.take_along_axis(target, at[..., None], 1)[:, 0]
    place = jnp.minimum(at, proposed.shape[1] - 1)
    if draft is None:
        tokens = jnp.arange(vocabulary)
        q = (tokens == jnp.take_along_axis(proposed, place, 1)).astype(p.dtype)
    else:
        q = jnp.take_along_axis(draft, place[..., None], 1)[:, 0]
    left = jnp.where(was_rejected[:, None], jnp.maximum(p - q, 0.0), p)
    noise = gumbel(seed, positions + num_accepted, vocabulary, _DRAW)
    return jnp.argmax(jnp.where(left > 0, jnp.log(left), -jnp.inf) + noise, -1).astype(jnp.int32)
