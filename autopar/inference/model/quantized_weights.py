"""Quantize weights, and compute with quantized ones.

In: float weights [..., out, in], or what a checkpoint stores. Out: arrays `weight`, `scale`, `zero` in the decoder's layout; and
inside a program, float weights.

    weight    int8 [..., out, in]; with 4 bits uint8 [..., out, in / 2], with input 2i in the low half of byte i
    scale     float [..., out, groups]
    zero      int16 [..., out, groups], if the range is not symmetric
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.inference.model.quantization import Quantization


def quantized(weights: NDArray[Any], how: Quantization, scale_dtype: Any) -> dict[str, NDArray[Any]]:
    """Quantize float weights `[..., out, in]` symmetrically. The last group may be smaller.

    The scale is rounded to its dtype first, so its rounding adds no error.
    """
    num, group = weights.shape[-1], how.group or weights.shape[-1]
    groups = how.num_groups(num)
    padded = np.pad(weights.astype(np.float32), [(0, 0)] * (weights.ndim - 1) + [(0, groups * group - num)])
    grouped = padded.reshape(*weights.shape[:-1], groups, group)
    most = 7 if how.bits == 4 else 127
    scale = (np.abs(grouped).max(-1) / most).astype(scale_dtype)
    safe = np.where(scale == 0, 1, scale.astype(np.float32))
    whole = np.clip(np.rint(grouped / safe[..., None]), -most - 1, most).reshape(padded.shape)[..., :num]
    return {"weight": packed((whole + how.zero).astype(np.int16), how), "scale": scale}


def packed(values: NDArray[Any], how: Quantization) -> NDArray[Any]:
    """Integers `[..., in]`, from 0 to 15 or from -128 to 127, as the decoder stores them."""
    if how.bits == 8:
        return values.astype(np.int8)
    pairs = values.astype(np.uint8).reshape(*values.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpacked(weight: jax.Array, how: Quantization) -> jax.Array:
    """The integers of stored weights, int8 `[..., in]`."""
    if how.bits == 8:
        return weight
    halves = jnp.stack([weight & 15, weight >> 4], axis=-1)
    return halves.reshape(*weight.shape[:-1], 2 * weight.shape[-1]).astype(jnp.int8)


def dequantized(
    weight: jax.Array, scale: jax.Array, zero: jax.Array | None, how: Quantization, dtype: Any
) -> jax.Array:
    """Float weights `[..., out, in]` of a dtype."""
    whole = unpacked(weight, how)
    num, groups = whole.shape[-1], scale.shape[-1]
    by_group = whole.reshape(*whole.shape[:-1], groups, num // groups)
    if zero is not None:
        by_group = by_group.astype(jnp.int16) - zero[..., None]
    elif how.zero:
        by_group = by_group - jnp.int8(how.zero)
    scaled = by_group.astype(jnp.float32) * scale[..., None].astype(jnp.float32)
    return scaled.astype(dtype).reshape(whole.shape)
