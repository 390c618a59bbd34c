"""Define the modules that every decoder consists of: matmuls, embeddings, norms.

In: arrays. Out: Flax modules whose parameters are [out, in], as in a checkpoint.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
}


class Linear(nn.Module):
    """A matmul that contracts the last dims of its input, `ins`, and appends the dims `outs`. Its weight is [*outs, *ins]."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    bias: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = parameter(self, "weight", nn.initializers.normal(0.02), (*self.outs, *self.ins))
        x_dims, weight_dims = range(x.ndim - len(self.ins), x.ndim), range(len(self.outs), weight.ndim)
        y = jax.lax.dot_general(x, weight, ((tuple(x_dims), tuple(weight_dims)), ((), ())))
        return y + parameter(self, "bias", nn.initializers.zeros, self.outs) if self.bias else y


class Embedding(nn.Module):
    """A table of `count` vectors of `size` elements: an embedding, or the head of a model."""

    count: int
    size: int

    def setup(self) -> None:
        self.weight = parameter(self, "weight", nn.initializers.normal(0.02), (self.count, self.size))

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Look up the vectors of `indices`."""
        return jnp.take(self.weight, indices, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Multiply hidden states with all vectors; float32."""
        contracted = ((hidden.ndim - 1,), (1,))
        return jax.lax.dot_general(hidden, self.weight, (contracted, ((), ())), preferred_element_type=jnp.float32)


class Norm(nn.Module):
    """RMS norm, or layer norm with a bias, over the last dims; computed in float32. In "rms_one" the weight is less one."""

    kind: str
    shape: tuple[int, ...]
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dims = tuple(range(-len(self.shape), 0))
        wide = x.astype(jnp.float32)
        if self.kind == "layer":
            wide = wide - wide.mean(dims, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(dims, keepdims=True) + self.epsilon)
        weight = parameter(self, "weight", nn.initializers.ones, self.shape)
        if self.kind == "rms":
            return wide.astype(x.dtype) * weight
        if self.kind == "rms_one":
            return (wide * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        bias = parameter(self, "bias", nn.initializers.zeros, self.shape)
        return (wide * weight + bias).astype(x.dtype)


def parameter(module: nn.Module, name: str, init: Any, shape: tuple[int, ...]) -> Any:
    """Return a parameter of a module, or initialize it.

    This replaces `module.param`, which traces the initializer of every existing parameter to compare shapes and so doubles
    the time to trace a program.

    Raises:
        ScopeParamShapeError: the existing parameter has another shape.
    """
    if module.is_initializing():
        return module.param(name, init, shape)
    value = module.get_variable("params", name)
    if value is None or value.shape != shape:
        return module.param(name, init, shape)  # raises the error
    return value
