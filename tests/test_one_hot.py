"""The gradient of picking one element per row: bit-identical results without a scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend.tracing import trace

pytestmark = pytest.mark.contract
Pick = Callable[[jax.Array, jax.Array], jax.Array]


def of_last(x: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, at[..., None], axis=-1)


def of_first(x: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x.transpose(2, 0, 1), at[None], axis=0)


def mapped(x: jax.Array, at: jax.Array) -> jax.Array:
    return jax.vmap(jax.vmap(lambda row, i: row[i]))(x, at)


def clipped(x: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, at[..., None], axis=-1, mode="clip")


def gradient(pick: Pick) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def loss(x: jax.Array, at: jax.Array) -> jax.Array:
        return (pick(x, at).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss)


def primitives(pick: Pick, x: Any, at: Any) -> list[str]:
    return [equation.primitive for equation in trace(gradient(pick), (x, at)).equations]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("places", ["int32", "uint8", "int16"])
@pytest.mark.parametrize("pick", [of_last, of_first, mapped, clipped])
def test_the_gradient_is_the_same_to_the_bit(pick: Pick, places: str, dtype: str) -> None:
    """Where a place is outside, too: JAX drops it, or takes the nearest."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 6, 200)), dtype)
    at = jnp.asarray(rng.integers(0, 255 if places == "uint8" else 300, size=(8, 6)), places)
    assert "scatter-add" not in primitives(pick, x, at)
    step = autopar.parallelize(gradient(pick), mesh="8", cache=False)
    want = jax.jit(gradient(pick))(x, at)
    np.testing.assert_array_equal(np.asarray(step(x, at)), np.asarray(want))


def test_what_adds_several_to_one_place_stays_a_scatter() -> None:
    """Of an embedding's gradient, rows meet; and what is added to other than zeros stays."""
    table, tokens = jnp.ones((50, 8)), jnp.zeros((4, 6), jnp.int32)
    looked_up = trace(jax.grad(lambda t, i: (t[i] ** 2).sum()), (table, tokens))
    assert "scatter-add" in [e.primitive for e in looked_up.equations]
    two = trace(
        jax.grad(lambda x, i: (jnp.take_along_axis(x, i, -1) ** 2).sum()),
        (jnp.ones((4, 50)), jnp.zeros((4, 2), jnp.int32)),
    )
    assert "scatter-add" in [e.primitive for e in two.equations]
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    onto = trace(
        lambda x, i, u: lax.scatter_add(x, i, u, numbers),
        (jnp.ones((4, 50)), jnp.zeros((4, 1), jnp.int32), jnp.ones(4)),
    )
    assert "scatter-add" in [e.primitive for e in onto.equations]


def test_the_dim_that_is_looked_up_in_can_be_split() -> None:
    """Nothing as large as the logits is gathered or moved for it."""

    def step(w: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return -of_last(jax.nn.log_softmax(x @ w), at).mean()

        return w - jax.grad(loss)(w)

    shapes = [((256, 32768), "float32"), ((8, 128, 256), "float32"), ((8, 128), "int32")]
    plan = autopar.plan(
        step,
        *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        mesh="1x8",
        hardware="h100-sxm",
        pin={"w": jax.sharding.PartitionSpec(None, "model")},
    )
    logits = 8 * 128 * 32768 * 4
    assert sum(use.num_bytes for use in plan.collectives) < logits / 8
