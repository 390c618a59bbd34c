"""Compute the logprobs of the tokens of a prompt, where a request needs them.

In: the last hidden states of prefill chunks, and the tokens after each. Out: `PromptLogprobs`. The logits of all tokens of a chunk are
large, so they are computed only if one of the chunks asks for them, and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.inference.step.host_inputs import Rows


class PromptLogprobs(NamedTuple):
    """Logprobs at each token of the chunks, `[rows, length]` each; 0 in rows that do not ask for them.

    Args:
        logprobs: f32, of the token that follows in the prompt.
        best_tokens: int32, the most probable token in its place. best_logprobs: f32.
    """

    logprobs: Any
    best_tokens: Any
    best_logprobs: Any


def prompt_logprobs(logits_of: Callable[[jax.Array], jax.Array], states: jax.Array, chunks: Rows) -> PromptLogprobs:
    """The logprobs of the next tokens of the prompts.

    Args:
        logits_of: from last hidden states to logits.
        states: `[rows * length, hidden]`.
    """
    rows, length = chunks.tokens.shape
    ranks = jnp.arange(length, dtype=jnp.int32)
    following = jnp.concatenate([chunks.tokens[:, 1:], chunks.tokens[:, :1]], 1)
    is_last = ranks == chunks.num_tokens[:, None] - 1
    following = jnp.where(is_last, jnp.maximum(chunks.next_token, 0)[:, None], following)

    def computed() -> PromptLogprobs:
        logits = logits_of(states)
        top = logits.max(-1)
        total = jnp.log(jnp.exp(logits - top[:, None]).sum(-1)) + top
        chosen = jnp.take_along_axis(logits, following.reshape(-1, 1), -1)[:, 0]
        best = jnp.argmax(logits, -1).astype(jnp.int32)
        return PromptLogprobs(*(each.reshape(rows, length) for each in (chosen - total, best, top - total)))

    def skipped() -> PromptLogprobs:
        zeros = jnp.zeros((rows, length), jnp.float32)
        return PromptLogprobs(zeros, jnp.zeros((rows, length), jnp.int32), zeros)

    return lax.cond((chunks.next_token >= 0).any(), computed, skipped)
