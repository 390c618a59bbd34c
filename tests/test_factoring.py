"""Dims that are cut into equal parts: which become two, and that the numbers stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import jax_compat
from autopar.factoring.rewrite import factor_dims
from autopar.graph.from_jaxpr import graph_of
from autopar.trace import LiteralOperand, Trace, trace

Array = jax.Array
WIDTH = 32
TOKENS = (4, 64, WIDTH)
HEADS = 4


def attention(q: Array, k: Array, v: Array) -> Array:
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)


def split_projections(w: Array, b: Array, x: Array) -> Array:
    return attention(*jnp.split(x @ w + b, 3, axis=-1))


def sliced_projections(w: Array, b: Array, x: Array) -> Array:
    fused = x @ w + b
    return attention(*(fused[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3)))


def transposed_projections(w: Array, b: Array, x: Array) -> Array:
    return attention(*jnp.split(x @ w.reshape(3 * WIDTH, WIDTH).T.astype(jnp.float32) + b[None, None], 3, axis=2))


def stacked_projections(w: Array, b: Array, x: Array) -> Array:
    fused = (x @ w + b).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = (fused[:, :, i].reshape(*x.shape) for i in range(3))
    return attention(q, k, v)


def unstacked_projections(w: Array, b: Array, x: Array) -> Array:
    fused = (x @ w + b).reshape(*x.shape[:2], 3, WIDTH)
    q, k, v = jnp.moveaxis(fused, 2, 0)
    return attention(q, k, v)


def gated(w: Array, b: Array, x: Array) -> Array:
    gate, up = jnp.split(x @ w[:, : 2 * WIDTH] + b[: 2 * WIDTH], 2, axis=-1)
    return jax.nn.silu(gate) * up


def gates(w: Array, b: Array, x: Array) -> Array:
    """Four weights joined, as a recurrent cell does, and the product cut again."""
    kernel = jnp.concatenate([w[:, :WIDTH], w[:, WIDTH : 2 * WIDTH], w[:, 2 * WIDTH :], w[:, WIDTH : 2 * WIDTH]], -1)
    i, f, g, o = jnp.split(jnp.tanh(x @ kernel), 4, axis=-1)
    return jax.nn.sigmoid(i * f) * g + o


def joined_features(w: Array, b: Array, x: Array) -> Array:
    """A product's summed dim, made of two: an edge of a graph with its two ends."""
    return jnp.concatenate([x, jnp.tanh(x)], -1) @ w.reshape(2 * WIDTH, -1)


def one_part(w: Array, b: Array, x: Array) -> Array:
    fused = x @ w + b
    return jnp.tanh(fused[..., WIDTH : 2 * WIDTH])


def reduced(w: Array, b: Array, x: Array) -> Array:
    fused = x @ w + b
    a, c, d = jnp.split(fused, 3, axis=-1)
    return a * c + d * fused.max(-1, keepdims=True) + jnp.where(fused > 0, fused, 0.0).sum(-1, keepdims=True)


PROJECTIONS = (
    split_projections,
    sliced_projections,
    transposed_projections,
    stacked_projections,
    unstacked_projections,
)
LAYOUTS = (*PROJECTIONS, gated, gates, joined_features, one_part, reduced)


def arguments() -> tuple[Array, Array, Array]:
    w, b, x = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(WIDTH, 3 * WIDTH), (3 * WIDTH,), TOKENS]))
    return w, b, x


def step(layout: Callable[..., Array]) -> Callable[..., Any]:
    def loss(w: Array, b: Array, x: Array) -> Array:
        return (layout(w, b, x) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def factored(traced: Trace) -> Trace:
    return factor_dims(traced, graph_of(traced, ()))


def evaluated(traced: Trace, args: tuple[Any, ...]) -> list[Any]:
    env: dict[int, Any] = {**dict(traced.constants), **dict(zip(traced.inputs, args, strict=True))}

    def read(atom: int | LiteralOperand) -> Any:
        return env[atom] if isinstance(atom, int) else atom.value

    for equation in traced.equations:
        results = jax_compat.bind(equation.source, [read(atom) for atom in equation.operands])
        for value, result in zip(equation.results, results, strict=True):
            assert result.shape == traced.avals[value].shape and result.dtype == traced.avals[value].dtype
            env[value] = result
    return [read(atom) for atom in traced.outputs]


def wide_cuts(traced: Trace) -> list[str]:
    """Equations that cut a dim, or join it, where a part holds more than one element of the dim."""
    found = []
    for equation in traced.equations:
        shapes = [traced.avals[v].shape for v in (*equation.operands, *equation.results) if isinstance(v, int)]
        if equation.primitive in ("split", "concatenate", "slice", "pad") and not any(1 in s[1:] for s in shapes):
            found.append(equation.primitive)
    return found


@pytest.mark.contract
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_stay(layout: Callable[..., Array]) -> None:
    args = arguments()
    traced = trace(step(layout), args)
    after = evaluated(factored(traced), args)
    for ours, theirs in zip(after, jax.tree.leaves(step(layout)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(np.abs(theirs).max()))


@pytest.mark.parametrize("layout", [*PROJECTIONS, gates, one_part, reduced])
def test_no_cut_remains(layout: Callable[..., Array]) -> None:
    traced = trace(step(layout), arguments())
    before, after = wide_cuts(traced), wide_cuts(factored(traced))
    assert len(after) < len(before) or layout in (stacked_projections, unstacked_projections)
    print(layout.__name__, Counter(before), Counter(after))
