"""Compute a mixture of experts: each token by the experts that a router chooses for it.

In: hidden states. Out: `MixtureOfExperts`. The rows of all tokens are sorted by expert, and each projection of all experts is
one ragged matmul (`lax.ragged_dot_general`), which a plan may split over the experts. No token is dropped, and a token's
result does not depend on the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from autopar.inference.model.layer_kinds import Experts
from autopar.inference.model.modules import ACTIVATIONS, Linear, parameter, quantized_parameter
from autopar.inference.model.quantization import Quantization

#: `t i, e o i -> t o`, where consecutive rows t belong to one expert e.
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class MixtureOfExperts(nn.Module):
    """A router, experts with gated feed-forward networks, and for some families one more expert for every token."""

    experts: Experts
    hidden_size: int
    activation: str
    quantization: Quantization | None = None
    plain: tuple[str, ...] = ()

    def setup(self) -> None:
        experts, hidden = self.experts, self.hidden_size

        def how(module: str) -> Quantization | None:
            return None if f"experts/{module}" in self.plain else self.quantization

        self.router = Linear((hidden,), (experts.num,), False, how("router"))
        self.gate = ExpertLinear(experts.num, hidden, experts.size, how("gate"))
        self.up = ExpertLinear(experts.num, hidden, experts.size, how("up"))
        self.down = ExpertLinear(experts.num, experts.size, hidden, how("down"))
        if experts.shared_size:
            self.shared_gate = Linear((hidden,), (experts.shared_size,), False, how("shared_gate"))
            self.shared_up = Linear((hidden,), (experts.shared_size,), False, how("shared_up"))
            self.shared_down = Linear((experts.shared_size,), (hidden,), False, how("shared_down"))
            self.shared_router = Linear((hidden,), (1,), False, how("shared_router"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs, [batch, tokens, hidden] like `x`."""
        num, per_token = self.experts.num, self.experts.per_token
        tokens = x.reshape(-1, self.hidden_size)
        probabilities = jax.nn.softmax(self.router(tokens).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, per_token)
        if self.experts.is_normalized:
            weights = weights / weights.sum(-1, keepdims=True)
        owners = chosen.reshape(-1)
        order = jnp.argsort(owners)  # the rows of all tokens, by expert
        sizes = (owners[:, None] == jnp.arange(num)).sum(0, dtype=jnp.int32)
        rows = jnp.take(tokens, order // per_token, axis=0)
        outputs = self.down(self.activated(self.gate(rows, sizes), self.up(rows, sizes)), sizes)
        by_token = jnp.take(outputs, jnp.argsort(order), axis=0).reshape(*chosen.shape, self.hidden_size)
        mixed = (by_token * weights[..., None].astype(x.dtype)).sum(1)
        if self.experts.shared_size:
            shared = self.shared_down(self.activated(self.shared_gate(tokens), self.shared_up(tokens)))
            mixed = mixed + jax.nn.sigmoid(self.shared_router(tokens)) * shared
        return mixed.reshape(x.shape)

    def activated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The input of the second projection."""
        return ACTIVATIONS[self.activation](gate) * up


class ExpertLinear(nn.Module):
    """A matmul of each expert with its own rows. Its weight is [experts, out, in]."""

    num: int
    ins: int
    outs: int
    how: Quantization | None = None

    @nn.compact
    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Multiply rows, of which the first `sizes[0]` belong to the first expert, and so on."""
        if self.how is None:
            weight = parameter(self, "weight", nn.initializers.normal(0.02), (self.num, self.outs, self.ins))
        else:
            outs = (self.num, self.outs)
            weight, factor = quantized_parameter(self, self.how, outs, (self.ins,), rows.dtype)
            weight = weight if factor is None else (weight * factor[..., None]).astype(rows.dtype)
        return jax.lax.ragged_dot_general(rows, weight, sizes, _BY_EXPERT)
