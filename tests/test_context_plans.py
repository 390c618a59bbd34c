"""The planner splits the tokens of an attention by the cheapest method of context parallelism, and devices run it so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.sharding import TensorSharding
from autopar.planner.planner import plan_program
from autopar.planner.request import PlanRequest
from autopar.runtime.context_parallel.kernels import BLOCKWISE
from autopar.transforms.program import program_of

RNG = np.random.default_rng(0)
H100 = "h100-sxm"


def gradients(**options: Any) -> Callable[..., Any]:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(q, k, v, **options).astype(jnp.float32)))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def plan_of(shapes: Any, spec: Any, mesh: str, **options: Any) -> autopar.Plan:
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    pin = dict.fromkeys(("q", "k", "v"), spec)
    plan = autopar.plan(gradients(implementation="cudnn", **options), *args, mesh=mesh, hardware=H100, pin=pin)
    assert isinstance(plan, autopar.Plan)
    return plan


def shapes_of(batch: int, tokens: int, heads: int, key_heads: int, dim: int = 64) -> list[tuple[int, ...]]:
    return [(batch, tokens, one, dim) for one in (heads, key_heads, key_heads)]


ONE_HEAD = shapes_of(1, 16_384, 4, 1)
MANY_HEADS = shapes_of(1, 16_384, 32, 32)


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_of_few_heads_travel_around_a_ring(causal: bool) -> None:
    plan = plan_of(ONE_HEAD, P(None, "data"), "8", is_causal=causal)
    assert {region.method for region in plan.regions} <= {"ring", "gathered"}
    assert all(region.operands[0].dims[1] == ("data",) for region in plan.regions)
    assert plan.replicated == ()
    assert any("share the tokens" in use.cause for use in plan.collectives)
    assert "attention" in plan.strategy and "`data`" in plan.strategy


def test_heads_are_split_where_there_are_enough() -> None:
    """Heads that all devices can share are resharded to them, as Ulysses does, unless a ring is cheaper."""
    plan = plan_of(MANY_HEADS, P(None, "data"), "8")
    assert len(plan.regions) == 2


def test_a_plan_file_keeps_the_method() -> None:
    plan = plan_of(ONE_HEAD, P(None, "data"), "8", is_causal=True)
    read = autopar.Plan.from_json(plan.to_json())
    assert [region.method for region in read.regions] == [region.method for region in plan.regions]


@pytest.mark.parametrize("tokens", [1000, 8 * 128 + 8])
def test_tokens_that_do_not_divide_into_chunks_stay_whole(tokens: int) -> None:
    """A causal mask needs two chunks per device."""
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes_of(1, tokens, 4, 1)]
    plan = autopar.plan(gradients(implementation="cudnn", is_causal=True), *args, mesh="8", hardware=H100)
    assert all(region.method is None for region in plan.regions)


def run_whole(monkeypatch: pytest.MonkeyPatch, mesh: str, spec: Any, shapes: Any, causal: bool, method: str) -> None:
    """Plan with one method of context parallelism alone, run, and compare with the step on one device."""
    monkeypatch.setattr("autopar.runtime.manual.kernels.CUDNN", BLOCKWISE)
    monkeypatch.setattr("autopar.cost.context_method.METHODS", (method,))
    step = gradients(implementation="cudnn", is_causal=causal)
    program = program_of(step, [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes], carry=(), donate=())
    nodes = [node for node in program.graph.nodes if node.primitive.startswith("dot_product_attention")]
    entries = [(one,) if isinstance(one, str) else tuple(one or ()) for one in (*spec, None, None)][:4]
    held = {node.results[0]: TensorSharding(tuple(entries)) for node in nodes}
    plan = plan_program(program, PlanRequest(mesh=mesh, hardware=H100, held=held))
    assert {region.method for region in plan.regions} == {method}
    args = [jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    got = autopar.parallelize(step, plan=plan)(*args)
    expected = jax.jit(gradients(implementation="xla", is_causal=causal))(*args)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.05, atol=0.1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["ring", "gathered"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_split_attention_equals_the_whole(monkeypatch: pytest.MonkeyPatch, causal: bool, method: str) -> None:
    run_whole(monkeypatch, "8", P(None, "data"), shapes_of(1, 256, 2, 1, 16), causal, method)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "spec", "shapes", "method"),
    [
        ("8", P(None, "data"), shapes_of(1, 256, 8, 1, 16), "ulysses"),
        ("data=2,model=4", P("data", "model"), shapes_of(2, 256, 2, 1, 16), "ring"),
        ("data=2,model=4", P("data", "model"), shapes_of(2, 256, 2, 1, 16), "gathered"),
        ("data=2,model=4", P(None, ("data", "model")), shapes_of(1, 256, 2, 1, 16), "ring"),
        ("data=4,model=2", P(None, "data", "model"), shapes_of(1, 256, 4, 2, 16), "ring"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_split_over_several_axes(
    monkeypatch: pytest.MonkeyPatch, mesh: str, spec: Any, shapes: Any, method: str, causal: bool
) -> None:
    run_whole(monkeypatch, mesh, spec, shapes, causal, method)
