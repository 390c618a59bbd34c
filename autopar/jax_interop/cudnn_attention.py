"""Bind the primitives of JAX's cuDNN attention, whose backward pass JAX does not expose.

In: one device's queries, keys and values [batch, tokens, heads, dim], in bfloat16 or float16.
Out: the output and the log-sum-exp of each query's scores, or the gradients. Binding needs no cuDNN: JAX checks it in
`jax.nn.dot_product_attention`.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as _cudnn

FORWARD = _cudnn._dot_product_attention_fwd_p_wrapper
BACKWARD = _cudnn._dot_product_attention_bwd_p_wrapper

#: The parameters of attention without bias, dropout and window. `score_mod` is new in JAX 0.12.
_PLAIN: dict[str, Any] = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),
    "layout": _cudnn.AttentionLayout.BTNH.value,
    "sliding_window_length": None,
} | ({"score_mod": None} if "score_mod" in inspect.signature(_cudnn._dot_product_attention_fwd).parameters else {})

#: Bias, sequence lengths of queries and keys, offsets of both, page tables of both: none.
_NUM_UNUSED = 7


def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float, is_causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Output [batch, tokens, heads, dim] and float32 log-sum-exp [batch, heads, tokens]."""
    operands = (query, key, value, *_unused(query))
    out, lse = FORWARD.bind(*operands, scale=scale, mask_type=_mask(is_causal), is_training=True, **_PLAIN)
    return out, lse


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The terms of the gradients from these keys. `out` and `lse` may be those over more keys."""
    operands = (query, key, value, *_unused(query), lse, out, d_out)
    d_query, d_key, d_value = BACKWARD.bind(*operands, scale=scale, mask_type=_mask(is_causal), **_PLAIN)
    return d_query, d_key, d_value


def _mask(is_causal: bool) -> Any:
    return _cudnn.MaskType.CAUSAL if is_causal else _cudnn.MaskType.NO_MASK


def _unused(query: jax.Array) -> list[jax.Array]:
    return [jnp.zeros(0, query.dtype)] * _NUM_UNUSED
