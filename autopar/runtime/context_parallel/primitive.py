"""Run an equation of cuDNN attention by a method of context parallelism.

In: inside `jax.shard_map`, the parameters of the equation and its local operands, with their tokens sharded.
Out: the equation's local results. Only what the methods compute is supported: no bias, sequence lengths, packed offsets,
pages, dropout, sliding window, or function of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import AttentionError
from autopar.frontend.kernel_flops import HEADS_FIRST
from autopar.runtime.context_parallel.kernels import CUDNN, Kernel
from autopar.runtime.context_parallel.methods import backward, forward

#: Operands of the forward pass: query, key, value, bias, then sequence lengths, packed offsets and page tables, empty where
#: unused. The backward pass has log-sum-exp, output and gradient of the output after them.
_NUM_FORWARD, _FIRST_LENGTHS = 10, 4


def unsupported(params: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """What an equation needs that no method computes; None if all can run it.

    Args:
        shapes: those of its operands.
    """
    mask = params["mask_type"].name
    needs = {
        "a bias": params["variadic_args"][0],
        "dropout": params["dropout_rate"] > 0,
        "a sliding window": params["sliding_window_length"] is not None,
        "a function of the scores": params.get("score_mod") is not None,
        "sequence lengths or pages": any(map(math.prod, shapes[_FIRST_LENGTHS:_NUM_FORWARD])),
        f"the mask {mask}": mask not in ("NO_MASK", "CAUSAL"),
    }
    return next((name for name, is_needed in needs.items() if is_needed), None)


def run(
    params: Mapping[str, Any],
    operands: Sequence[jax.Array],
    *,
    method: str,
    axes: tuple[str, ...],
    kernel: Kernel = CUDNN,
) -> Sequence[jax.Array]:
    """The results of an equation of the forward or of the backward pass.

    Args:
        axes: the mesh axes that shard the tokens.

    Raises:
        AttentionError: the equation has what the methods do not compute, or a shape that this method cannot shard.
    """
    if reason := unsupported(params, list(map(jnp.shape, operands))):
        raise AttentionError(f"attention with {reason} cannot run with its sequence sharded: shard its batch or heads")
    heads_first = params["layout"] == HEADS_FIRST

    def turned(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 1, 2) if heads_first else x

    is_causal = params["mask_type"].name == "CAUSAL"
    query, key, value = map(turned, operands[:3])
    if len(operands) == _NUM_FORWARD:
        out, lse = forward(method, kernel, query, key, value, axes=axes, scale=params["scale"], is_causal=is_causal)
        return [turned(out), lse] if params["is_training"] else [turned(out)]
    lse, out, d_out = operands[_NUM_FORWARD:]
    given = (query, key, value, turned(out), lse, turned(d_out))
    gradients = backward(method, kernel, *given, axes=axes, scale=params["scale"], is_causal=is_causal)
    return list(map(turned, gradients))
