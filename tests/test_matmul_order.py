"""Transposes move to the small side of matmuls; results stay the same."""

from __future__ import annotations

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.frontend.trace import Trace
from autopar.frontend.tracing import trace
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for

SIZES = {"b": 2, "g": 3, "q": 16, "s": 16, "r": 2, "k": 4}


def _array(dims: str, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), [SIZES[d] for d in dims])


def _attention(q: Any, k: Any, v: Any, groups: str = "r") -> Any:
    scores = jnp.einsum(f"bqg{groups}k,bsgk->bg{groups}qs", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    return jnp.einsum(f"bg{groups}qs,bsgk->bqg{groups}k", weights, v)


def _gradients(q: Any, k: Any, v: Any, groups: str = "r") -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(_attention(q, k, v, groups) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def _transposed(made: Trace, least: int = 0) -> list[tuple[int, ...]]:
    """The shapes of the transposes of at least this many elements."""
    shapes = [made.avals[e.results[0]].shape for e in made.equations if e.primitive == "transpose"]
    return [shape for shape in shapes if math.prod(shape) >= least]


def _check_equal(function: Any, *args: Any) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    planned = autopar.parallelize(function, mesh=mesh, hardware="h100-sxm")
    expected = jax.tree.leaves(jax.jit(function)(*args))
    for made, want in zip(jax.tree.leaves(planned(*args)), expected, strict=True):
        np.testing.assert_allclose(made, want, rtol=2e-5, atol=2e-5)


def test_scores_of_grouped_query_attention_are_not_transposed() -> None:
    args = _array("bqgrk"), _array("bsgk", 1), _array("bsgk", 2)
    scores = math.prod(SIZES[d] for d in "bgrqs")
    assert _transposed(trace(_attention, args), scores) == []
    assert _transposed(trace(_gradients, args), scores) == []
    _check_equal(_gradients, *args)


def test_scores_in_a_scan_with_remat_are_not_transposed() -> None:
    def step(q: Any, keys: Any, values: Any) -> Any:
        def loss(q: Any, keys: Any, values: Any) -> Any:
            body = jax.checkpoint(lambda q, kv: (q + _attention(q, *kv), None))
            return jnp.sum(jax.lax.scan(body, q, (keys, values))[0] ** 2)

        return jax.value_and_grad(loss, (0, 1, 2))(q, keys, values)

    keys, values = (jnp.stack([_array("bsgk", i), _array("bsgk", i + 1)]) for i in (1, 3))
    args = _array("bqgrk"), keys, values
    assert _transposed(trace(step, args), math.prod(SIZES[d] for d in "bgrqs")) == []
    _check_equal(step, *args)


def test_multi_head_attention_is_left_alone() -> None:
    args = _array("bqgk"), _array("bsgk", 1), _array("bsgk", 2)
    jaxpr = jax.make_jaxpr(lambda *a: _attention(*a, groups=""))(*args)
    made = trace(lambda *a: _attention(*a, groups=""), args)
    assert len(_transposed(made)) == str(jaxpr).count(" transpose[")


def test_gradients_of_batched_weights_are_not_transposed() -> None:
    """XLA would transpose them in the update, which then copies the experts' weights."""

    def step(weights: Any, x: Any) -> Any:
        gradients = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.einsum("ebcm,emh->ebch", x, w))))(weights)
        return weights - 0.1 * gradients

    args = jnp.ones((4, 8, 16)), jnp.ones((4, 2, 3, 8))
    assert "transpose" in str(jax.make_jaxpr(step)(*args))
    assert _transposed(trace(step, args)) == []
    _check_equal(step, *args)


@pytest.mark.parametrize("pin", [P(), P("data"), P(None, "data")])
def test_no_constraint_keeps_xla_from_swapping_the_operands_of_a_gradient(pin: P) -> None:
    """XLA would copy the transposed gradient of the result; the update reads the gradient of the weight."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    w, x = jax.random.normal(jax.random.key(0), (256, 512)), jax.random.normal(jax.random.key(1), (64, 4, 256))
    options = {
        "mesh": jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]),
        "hardware": "h100-sxm",
        "pin": {"x": P("data"), "w": pin},
    }
    plan, program = autopar.parallelize(step, **options).planned(w, x)
    jitted = jit_plan(plan, program.of(plan).trace, abstract_mesh(plan.mesh))
    lines = lower_for("cuda", jitted, jax.eval_shape(lambda *args: args, w, x)).as_text().splitlines()
    (transposed,) = [line.split()[3].rstrip(",") for line in lines if "stablehlo.transpose" in line]
    (made,) = [line for line in lines if line.lstrip().startswith(f"{transposed} =")]
    assert "dot_general" in made and any("sharding_constraint" in line for line in lines)
    np.testing.assert_allclose(autopar.parallelize(step, **options)(w, x), step(w, x), rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(12))
def test_random_einsums_and_their_gradients_are_equal(seed: int) -> None:
    rng = random.Random(seed)

    def shuffled(dims: str) -> str:
        return "".join(rng.sample(dims, len(dims)))

    sizes = {d: rng.choice([1, 2, 3]) for d in "ab"} | {d: rng.choice([4, 5, 6]) for d in "cdefgh"} | {"i": 2, "j": 2}
    batch, lhs, rhs, summed = "ab", "cde", "fgh", "ij"
    free = [shuffled(lhs), shuffled(rhs)]
    rng.shuffle(free)
    x, y, out = shuffled(batch + lhs + summed), shuffled(batch + rhs + summed), shuffled(batch) + "".join(free)

    def step(x_: Any, y_: Any) -> Any:
        def loss(x_: Any, y_: Any) -> Any:
            return jnp.sum(jnp.sin(jnp.einsum(f"{x},{y}->{out}", x_, y_)))

        return jax.value_and_grad(loss, (0, 1))(x_, y_)

    arrays = [jax.random.normal(jax.random.key(i), [sizes[d] for d in dims]) for i, dims in enumerate((x, y))]
    product = math.prod(sizes[d] for d in out)
    jaxpr = str(jax.make_jaxpr(step)(*arrays))
    if free in (["cde", "fgh"], ["fgh", "cde"]):
        assert len(_transposed(trace(step, arrays))) == jaxpr.count(" transpose[")
    elif out.startswith("ab"):
        assert _transposed(trace(step, arrays), product) == []
    _check_equal(step, *arrays)
