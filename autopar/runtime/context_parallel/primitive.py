"""Run an equation of cuDNN attention by a method of context parallelism.

In: inside `jax.shard_map`, the parameters of the equation and its local operands, with their tokens sharded.
Out: the equation's local results. Only what the methods compute is supported: no bias, sequence lengths, packed offsets,
pages, dropout, sliding window, or function of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import AttentionError
from autopar.frontend.kernel_flops import HEADS_FIRST
from autopar.frontend.kernel_loops import needs_whole_sequence
from autopar.runtime.context_parallel.kernels import Kernel
from autopar.runtime.context_parallel.methods import backward, forward

#: Operands of the forward pass: query, key, value, bias, then sequence lengths, packed offsets and page tables, empty where
#: unused. The backward pass has log-sum-exp, output and gradient of the output after them.
_NUM_FORWARD = 10


def run(
    params: Mapping[str, Any],
    operands: Sequence[jax.Array],
    *,
    method: str,
    axes: tuple[str, ...],
    kernel: Kernel,
) -> Sequence[jax.Array]:
    """The results of an equation of the forward or of the backward pass.

    Args:
        axes: the mesh axes that shard the tokens.

    Raises:
        AttentionError: the equation has what the methods do not compute, or a shape that this method cannot shard.
    """
    if reason := needs_whole_sequence(params, list(map(jnp.shape, operands))):
        raise AttentionError(f"attention with {reason} cannot run with its sequence sharded: shard its batch or heads")
    heads_first = params["layout"] == HEADS_FIRST

    def turned(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 1, 2) if heads_first else x

    is_causal = params["mask_type"].name == "CAUSAL"
    is_backward = len(operands) > _NUM_FORWARD
    if is_backward:  # XLA would merge moves with those of the forward pass, and keep the blocks
        operands = jax.lax.optimization_barrier(tuple(operands))
    query, key, value = map(turned, operands[:3])
    if not is_backward:
        out, lse = forward(method, kernel, query, key, value, axes=axes, scale=params["scale"], is_causal=is_causal)
        return [turned(out), lse] if params["is_training"] else [turned(out)]
    lse, out, d_out = operands[_NUM_FORWARD:]
    given = (query, key, value, turned(out), lse, turned(d_out))
    gradients = backward(method, kernel, *given, axes=axes, scale=params["scale"], is_causal=is_causal)
    return list(map(turned, gradients))
