"""Define the modules that every decoder consists of: matmuls, embeddings, norms.

In: arrays. Out: Flax modules whose parameters are [out, in], as in a checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from autopar.inference.model.quantization import Quantization
from autopar.inference.model.quantized_weights import dequantized, unpacked

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
    how: Quantization | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        factor = None
        if self.how is None:
            weight = parameter(self, "weight", nn.initializers.normal(0.02), (*self.outs, *self.ins))
        else:
            weight, factor = quantized_parameter(self, self.how, self.outs, self.ins, x.dtype)
        x_dims, weight_dims = range(x.ndim - len(self.ins), x.ndim), range(len(self.outs), weight.ndim)
        y = jax.lax.dot_general(x, weight, ((tuple(x_dims), tuple(weight_dims)), ((), ())))
        y = y if factor is None else (y * factor).astype(x.dtype)
        return y + parameter(self, "bias", nn.initializers.zeros, self.outs) if self.bias else y


class Embedding(nn.Module):
    """A table of `count` vectors of `size` elements: an embedding, or the head of a model."""

    count: int
    size: int
    how: Quantization | None = None

    def setup(self) -> None:
        if self.how is None:
            self.weight = parameter(self, "weight", nn.initializers.normal(0.02), (self.count, self.size))
            return
        assert self.how == Quantization(8, None), "an embedding is quantized by rows, with 8 bits"
        self.weight = parameter(self, "weight", _zeros(jnp.int8), (self.count, self.size))
        self.scale = parameter(self, "scale", nn.initializers.ones, (self.count, 1))

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Look up the vectors of `indices`."""
        found = jnp.take(self.weight, indices, axis=0, mode="clip")
        if self.how is None:
            return found
        scale = jnp.take(self.scale, indices, axis=0, mode="clip")
        return (found * scale.astype(jnp.float32)).astype(scale.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Multiply hidden states with all vectors; float32."""
        contracted, weight = ((hidden.ndim - 1,), (1,)), self.weight
        weight = weight if self.how is None else weight.astype(hidden.dtype)
        logits = jax.lax.dot_general(hidden, weight, (contracted, ((), ())), preferred_element_type=jnp.float32)
        return logits if self.how is None else logits * self.scale[:, 0].astype(jnp.float32)


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


def quantized_parameter(
    module: nn.Module, how: Quantization, outs: tuple[int, ...], ins: tuple[int, ...], dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Return the quantized weight of a module as floats `[*outs, *ins]`, and the factor of its results `[*outs]`.

    The factor is the scale of each output, if all its inputs share one; otherwise the weights have it, and it is None.
    """
    groups = how.num_groups(math.prod(ins))
    stored = (*outs, *ins[:-1], ins[-1] // how.per_byte)
    weight = parameter(module, "weight", _zeros(jnp.uint8 if how.bits == 4 else jnp.int8), stored)
    scale = parameter(module, "scale", nn.initializers.ones, (*outs, groups))
    zero = parameter(module, "zero", _zeros(jnp.int16), (*outs, groups)) if how.has_zeros else None
    if groups == 1 and zero is None:
        whole = unpacked(weight, how)
        whole = whole if how.zero == 0 else whole - jnp.int8(how.zero)
        return whole.astype(dtype), scale[..., 0].astype(jnp.float32)
    flat = weight.reshape(*outs, -1)
    return dequantized(flat, scale, zero, how, dtype).reshape(*outs, *ins), None


def _zeros(dtype: Any) -> Any:
    """An initializer of integers."""
    return lambda key, shape: jnp.zeros(shape, dtype)


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
