"""What runs under plain `jit` runs here too, with the same numbers: loops by row, callbacks, collectives of `vmap`, ..."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar

OPTIONS: dict[str, Any] = {"mesh": "8", "hardware": "cpu-host", "cache": False}
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def assert_as_jit(step: Any, *args: Any, **options: Any) -> None:
    expected = jax.jit(step)(*args)
    got = autopar.parallelize(step, **OPTIONS, **options)(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


def by_row(x: Any, num: Any) -> Any:
    return jax.vmap(lambda r, t: lax.while_loop(lambda s: s[0] < t, lambda s: (s[0] + 1, s[1] * 0.9 + 0.1), (0, r))[1])(
        x, num
    )


@pytest.mark.contract
def test_a_while_loop_with_a_condition_for_each_row() -> None:
    assert_as_jit(lambda w, x, num: (by_row(x, num) @ w).sum(1), W, X, np.arange(16, dtype=np.int32) % 5)


def test_a_callback_with_a_scalar_result() -> None:
    def step(w: Any, x: Any) -> Any:
        told = jax.pure_callback(lambda a: np.float32(a.sum()), jax.ShapeDtypeStruct((), jnp.float32), x)
        return (x @ w).mean() + told

    assert_as_jit(step, W, X)


def test_collectives_over_the_rows_of_a_vmap_are_reductions() -> None:
    def row(x: Any, w: Any) -> Any:
        h = x @ w
        low, high = lax.pmin(h, "rows"), lax.pmax(h, "rows")
        return (h - lax.pmean(h, "rows")) / (high - low)

    def step(w: Any, x: Any) -> Any:
        return jax.vmap(row, in_axes=(0, None), axis_name="rows")(x, w)

    assert_as_jit(step, W, X)
    plan = autopar.plan(step, W, X, **OPTIONS)
    assert not {"psum", "pmax", "pmin", "psum_invariant"} & set(plan.program.primitives)


@pytest.mark.parametrize("shape", [(0, 8), (16, 0)])
def test_an_empty_batch(shape: tuple[int, int]) -> None:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    assert_as_jit(step, jnp.ones((shape[1], 4)), np.ones(shape, np.float32))
