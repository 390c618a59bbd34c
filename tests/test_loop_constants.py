"""Masks are computed inside the loops that read them; results stay the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend import loop_constants
from autopar.frontend.tracing import trace

TOKENS, WIDTH, LAYERS = 16, 8, 3


@pytest.fixture(autouse=True)
def _small_constants_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_constants, "_LEAST_BYTES", TOKENS**2)


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def constants(function: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of the constants of loops with at least as many elements as a mask."""
    made = trace(function, args)
    shapes = [made.avals[e.results[0]].shape for e in made.equations if e.takes_constant]
    return [shape for shape in shapes if math.prod(shape) >= TOKENS**2]


def check_equal(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    planned = autopar.parallelize(function, mesh=mesh, hardware="h100-sxm", cache=False, **options)
    expected = jax.tree.leaves(jax.jit(function)(*args))
    for made, want in zip(jax.tree.leaves(planned(*args)), expected, strict=True):
        np.testing.assert_allclose(made, want, rtol=2e-5, atol=2e-5)


def causal() -> jax.Array:
    return jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
    q = x @ weights
    scores = jnp.where(causal(), jnp.einsum("bqd,bkd->bqk", q, x), -1e30)
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x), None


def loss(weights: jax.Array, x: jax.Array, body: Callable[..., Any] = layer) -> jax.Array:
    return (jax.lax.scan(body, x, weights)[0] ** 2).sum()


@pytest.mark.parametrize("remat", [False, True])
def test_a_causal_mask_is_computed_in_both_passes(remat: bool) -> None:
    body = jax.checkpoint(layer) if remat else layer
    step = jax.value_and_grad(lambda weights, x: loss(weights, x, body))
    args = array(LAYERS, WIDTH, WIDTH), array(2, TOKENS, WIDTH, seed=1)
    assert not constants(step, *args)
    check_equal(step, *args)


def test_microbatches_share_a_mask() -> None:
    def step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(lambda w: (jax.lax.scan(layer, batch["x"], w)[0] ** 2).mean())(weights)
        return weights - 0.1 * gradient, value

    args = array(LAYERS, WIDTH, WIDTH), {"x": array(4, TOKENS, WIDTH, seed=1)}
    assert not constants(step, *args)
    check_equal(step, *args, num_microbatches=2)


def test_sines_and_inputs_remain_constants() -> None:
    def step(x: jax.Array, table: jax.Array) -> jax.Array:
        cosines = jnp.cos(jnp.arange(TOKENS)[:, None] * jnp.arange(TOKENS)[None] * 0.01)
        return jax.lax.scan(lambda c, _: (c * cosines + table, None), x, length=LAYERS)[0]

    args = array(TOKENS, TOKENS), array(TOKENS, TOKENS, seed=1)
    assert constants(step, *args) == [(TOKENS, TOKENS)] * 2
    check_equal(step, *args)


def test_small_constants_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_constants, "_LEAST_BYTES", 1 << 20)
    args = array(LAYERS, WIDTH, WIDTH), array(2, TOKENS, WIDTH, seed=1)
    assert constants(jax.value_and_grad(loss), *args)


def test_nested_loops_compute_it_in_the_inner_one() -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jax.lax.scan(layer, c, w)[0], None), x, weights)[0]

    args = array(2, LAYERS, WIDTH, WIDTH), array(2, TOKENS, WIDTH, seed=1)
    assert not constants(step, *args)
    check_equal(step, *args)


def test_a_constant_that_a_loop_returns() -> None:
    def step(x: jax.Array) -> Any:
        mask = causal()
        return jax.lax.scan(lambda c, _: (jnp.where(mask, c, 0.0), mask), x, length=LAYERS)

    check_equal(step, array(TOKENS, TOKENS))


def test_a_branch_in_a_loop_reads_the_mask() -> None:
    def step(x: jax.Array, flags: jax.Array) -> Any:
        mask = causal()
        body = lambda c, flag: (jax.lax.cond(flag, lambda v: jnp.where(mask, v, 1.0), lambda v: v * 2, c), None)  # noqa: E731
        return jax.lax.scan(body, x, flags)[0]

    check_equal(step, array(TOKENS, TOKENS), jnp.array([True, False, True]))
