"""A layer's feed-forward as a mixture of experts, as in GShard. In: sizes. Out: a Flax module.

Each token goes to its two best experts, up to their capacity. Tokens are dispatched by a matmul with a mask, so that
shapes are static.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.training import F32

#: Capacity of an expert, relative to its tokens under equal load.
CAPACITY_FACTOR = 1.25
#: Experts per token.
TOP = 2


class Experts(nn.Module):
    """The feed-forward of a layer: `(batch, tokens, width)` to the same shape, and the load-balancing loss."""

    num_experts: int
    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        count, width = self.num_experts, x.shape[-1]
        capacity = int(CAPACITY_FACTOR * TOP * x.shape[1] / count)
        gates = nn.softmax(nn.Dense(count, use_bias=False, dtype=F32, name="router")(x.astype(F32)))
        best, experts = jax.lax.top_k(gates, TOP)
        best = best / best.sum(-1, keepdims=True)
        combine = jnp.zeros((*x.shape[:2], count, capacity), self.dtype)
        taken = jnp.zeros((x.shape[0], 1, count), jnp.int32)
        for n in range(TOP):
            chosen = jax.nn.one_hot(experts[..., n], count, dtype=jnp.int32)
            place = jnp.cumsum(chosen, 1) - chosen + taken
            taken += chosen.sum(1, keepdims=True)
            places = jax.nn.one_hot((place * chosen).sum(-1), capacity, dtype=self.dtype)
            weight = best[..., n, None, None].astype(self.dtype)
            combine += weight * chosen[..., None].astype(self.dtype) * places[:, :, None]
        init = nn.initializers.lecun_normal(batch_axis=0)
        gate, up = (self.param(name, init, (count, width, self.hidden)) for name in ("gate_experts", "up_experts"))
        down = self.param("down_experts", init, (count, self.hidden, width))
        # The norm before this multiplies by float32 weights; without a cast, all that follows would be float32.
        sent = self.to_experts(jnp.einsum("bsec,bsm->ebcm", (combine > 0).astype(self.dtype), x.astype(self.dtype)))
        opened = nn.silu(jnp.einsum("ebcm,emh->ebch", sent, gate.astype(self.dtype)))
        opened *= jnp.einsum("ebcm,emh->ebch", sent, up.astype(self.dtype))
        made = self.from_experts(jnp.einsum("ebch,ehm->ebcm", opened, down.astype(self.dtype)))
        first = jax.nn.one_hot(experts[..., 0], count, dtype=F32)
        balance = count * (first.mean((0, 1)) * gates.mean((0, 1))).sum()
        return jnp.einsum("bsec,ebcm->bsm", combine, made), balance

    def to_experts(self, sent: jax.Array) -> jax.Array:
        """What each expert reads; a recipe by hand may constrain it."""
        return sent

    def from_experts(self, made: jax.Array) -> jax.Array:
        """What each expert returns; a recipe by hand may constrain it."""
        return made
