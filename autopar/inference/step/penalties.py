"""Change logits by biases and by the tokens so far, and count the tokens as they are sampled.

In: logits, the `TokenCounts` of all slots, the parameters of each row. Out: logits. Counts are kept on the devices, because the newest
tokens may be there alone: an iteration is dispatched before the results of the one before are known. All operations are
elementwise in the vocabulary, so it may be split over devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar.inference.step.sampling_params import SamplingParams, TokenCounts

_ONCE = 2  # what one generated token adds to its count


def adjusted(logits: jax.Array, state: TokenCounts, owners: jax.Array, params: SamplingParams) -> jax.Array:
    """Add biases and subtract penalties.

    Args:
        logits: f32 `[slots + further rows, vocabulary]`.
        owners: int32 `[further rows]`, the slot of each row after those of the slots. params: of all rows.
    """

    def changed() -> jax.Array:
        counts, bias = (
            jnp.concatenate([each, each.at[owners].get(mode="clip")]) if owners.size else each for each in state
        )
        return _adjusted(logits, counts, bias, params)

    return lax.cond(_is_any(params), changed, lambda: logits)


def adjusted_after_drafts(
    logits: jax.Array, state: TokenCounts, drafts: jax.Array, params: SamplingParams
) -> jax.Array:
    """Add biases and subtract penalties after each draft token.

    Args:
        logits: f32 `[slots, 1 + drafts, vocabulary]`. drafts: int32 `[slots, drafts]`.
    """

    def changed() -> jax.Array:
        tokens = lax.broadcasted_iota(jnp.int32, state.counts.shape, 1)
        counts, positions = state.counts, [_adjusted(logits[:, 0], state.counts, state.bias, params)]
        for at in range(drafts.shape[1]):
            counts = counts + _ONCE * (tokens == drafts[:, at, None])
            positions.append(_adjusted(logits[:, at + 1], counts, state.bias, params))
        return jnp.stack(positions, 1)

    return lax.cond(_is_any(params), changed, lambda: logits)


def counted(state: TokenCounts, owners: jax.Array, tokens: jax.Array) -> TokenCounts:
    """Count sampled tokens.

    Args:
        owners: int32 `[n]`, the slot of each token; the number of slots for one that does not count. tokens: int32 `[n]`.
    """
    return state._replace(counts=state.counts.at[owners, tokens].add(_ONCE, mode="drop"))


def started(state: TokenCounts, slot: jax.Array, row: TokenCounts) -> TokenCounts:
    """Set the counts and the biases of a slot.

    Args:
        slot: int32 `[1]`. row: `[vocabulary]` each.
    """
    is_slot = jnp.arange(state.counts.shape[0], dtype=jnp.int32)[:, None] == slot
    return TokenCounts(*(jnp.where(is_slot, new[None], old) for new, old in zip(row, state, strict=True)))


def _is_any(params: SamplingParams) -> jax.Array:
    return (params.has_penalty() | (params.has_bias != 0)).any()


def _adjusted(logits: jax.Array, counts: jax.Array, bias: jax.Array, params: SamplingParams) -> jax.Array:
    repetition, frequency, presence = (
        each[:, None] for each in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    logits = logits + jnp.where(params.has_bias[:, None] != 0, bias, 0.0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    num = (counts // _ONCE).astype(jnp.float32)
    return jnp.where(counts > 0, repeated, logits) - frequency * num - presence * (num > 0)
