"""Scans over stacked layers: stacks stay sharded, a slice is gathered in each iteration, gradients are scattered there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.plans.plan import Plan

LAYERS = 8
POLICIES = {
    "none": None,
    "everything again": jax.checkpoint_policies.nothing_saveable,
    "matmuls kept": jax.checkpoint_policies.dots_saveable,
}


def mlp(x: jax.Array, w: Any) -> jax.Array:
    half = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
    return x + jax.nn.gelu(x @ half["up"]) @ half["down"]


def square(x: jax.Array, w: Any) -> jax.Array:
    """Weights as small as attention's: gathering the updated stack once would be a little faster."""
    half = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
    return x + jax.nn.gelu(x @ half["up"]) @ half["out"]


def gated(x: jax.Array, w: Any) -> jax.Array:
    half = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
    return x + (jax.nn.silu(x @ half["gate"]) * (x @ half["up"])) @ half["down"]


def shapes(width: int, *names: str) -> Any:
    return {n: (LAYERS, 4 * width, width) if n == "down" else (LAYERS, width, 4 * width) for n in names}


def stepped(layer: Callable[..., Any], policy: str) -> Callable[..., Any]:
    block = layer if policy == "none" else jax.checkpoint(layer, policy=POLICIES[policy], prevent_cse=False)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(lambda carry, w: (block(carry, w), None), x, params)
        return (out.astype(jnp.float32) ** 2).mean()

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def pair(x: jax.Array, w: Any) -> jax.Array:
    """Two different blocks in one iteration."""
    return gated(mlp(x, w["first"]), w["second"])


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "square weights": (square, lambda width: dict.fromkeys(("up", "out"), (LAYERS, width, width))),
    "one block": (mlp, lambda width: shapes(width, "up", "down")),
    "pairs of blocks": (
        pair,
        lambda width: {"first": shapes(width, "up", "down"), "second": shapes(width, "gate", "up", "down")},
    ),
}


def abstract(case: str, width: int) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        CASES[case][1](width),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def planned(case: str, policy: str) -> Plan:
    x = jax.ShapeDtypeStruct((32_768, 4096), jnp.bfloat16)
    return autopar.plan(stepped(CASES[case][0], policy), abstract(case, 4096), x, mesh="16", hardware="h100-sxm")


#: Without rematerialization of square weights, saved copies of the gathered weights are predicted slower than one gather of
#: the stack.
PER_ITERATION = [
    (case, policy) for case in CASES for policy in POLICIES if (case, policy) != ("square weights", "none")
]


@pytest.mark.parametrize(("case", "policy"), PER_ITERATION)
def test_stacks_are_gathered_and_scattered_per_iteration(case: str, policy: str) -> None:
    plan = planned(case, policy)
    stacks = [t for t in plan.inputs if t.role == "parameter"]
    assert all(t.sharding.dims[0] == () and set(t.sharding.axes) == {"data"} for t in stacks), plan.inputs
    moved = [c for c in plan.collectives if c.num_bytes > 1e6]
    assert {c.kind for c in moved} == {"all-gather", "reduce-scatter"}
    assert {c.num_times for c in moved} == {LAYERS}
    whole = max(t.num_bytes for t in stacks) * 16
    assert plan.prediction.temporary_bytes < (5 if policy == "none" else 3) * whole


def test_stacks_of_gradients_are_live_throughout_the_backward_loop() -> None:
    plan = planned("one block", "everything again")
    assert plan.memory is not None
    start, stop, _ = max(plan.memory.loops)  # the backward loop, which writes the stacks of gradients
    gradients = sum(t.num_bytes for t in plan.inputs if t.role == "parameter")
    residuals = LAYERS * 32_768 * 4096 * 2 / 16
    start += 2  # the weights of the first iteration are gathered before it
    assert min(plan.memory.live_bytes[start : stop - 1]) >= gradients + residuals


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_stack_trains_as_unsharded(case: str) -> None:
    step = stepped(CASES[case][0], "matmuls kept")
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) / 16, abstract(case, 32))
    x = jax.random.normal(next(keys), (64, 32))
    expected, loss = jax.jit(step)(params, x)
    run = autopar.parallelize(mesh="8", hardware="h100-sxm", pin={"params/*": P(None, "data"), "x": P("data")})(step)
    found, other = run(jax.tree.map(jnp.copy, params), x)
    assert np.isfinite(loss)
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
