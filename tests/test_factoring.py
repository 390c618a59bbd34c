"""Dims that are cut into equal parts: which become two dims, and unchanged results."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from any_choice import AnyChoice
from jax import lax

import autopar
from autopar.frontend.equations import LiteralOperand
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.trace import Trace
from autopar.frontend.tracing import trace
from autopar.ir.verifier import check
from autopar.jax_interop import compat as jax_compat
from autopar.runtime import jit as execute
from autopar.transforms.program import program_of
from autopar.transforms.split_dims.rewrite import factor_dims
from autopar.xla_compiler import hlo_collectives as hlo
from tests.planned import plan_program

PROFILE = str(Path(__file__).parent / "profiles" / "alpha_beta.toml")
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
    shapes = [(WIDTH, 3 * WIDTH), (3 * WIDTH,), TOKENS]
    w, b, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    return w, b, x


def step(layout: Callable[..., Array]) -> Callable[..., Any]:
    def loss(w: Array, b: Array, x: Array) -> Array:
        return (layout(w, b, x) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


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
        if equation.primitive in ("split", "concatenate", "slice", "pad") and not any(1 in s for s in shapes):
            found.append(equation.primitive)
    return found


@pytest.mark.sampled(2)
@pytest.mark.contract
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_stay(layout: Callable[..., Array]) -> None:
    args = arguments()
    traced = trace(step(layout), args)
    after = evaluated(factored(traced), args)
    for ours, theirs in zip(after, jax.tree.leaves(step(layout)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(np.abs(theirs).max()))


@pytest.mark.parametrize("layout", [split_projections, sliced_projections, transposed_projections, one_part, reduced])
def test_no_dim_is_cut_within(layout: Callable[..., Array]) -> None:
    traced = trace(step(layout), arguments())
    assert wide_cuts(traced) and not wide_cuts(factored(traced))


def test_a_gradient_is_joined_as_its_product_is_cut() -> None:
    """Of a first layer nothing but the weight's gradient is wanted: no loop leads from that to the weight."""
    w, _, x = arguments()
    traced = trace(jax.grad(lambda w: (gated_alone(w, x) ** 2).mean()), (w[:, : 2 * WIDTH],))
    assert "concatenate" in wide_cuts(traced) and not wide_cuts(factored(traced))


def gated_alone(w: Array, x: Array) -> Array:
    gate, up = jnp.split(x @ w, 2, axis=-1)
    return jax.nn.silu(gate) * up


def test_joined_weights_are_stacked_and_their_product_unstacked() -> None:
    traced = trace(step(gates), arguments())
    assert {"split", "concatenate"} <= set(wide_cuts(traced)) and not wide_cuts(factored(traced))


@pytest.mark.parametrize("layout", [stacked_projections, unstacked_projections])
def test_a_reshape_to_a_stack_is_pushed_up_to_the_weight(layout: Callable[..., Array]) -> None:
    products = [e for e in factored(trace(step(layout), arguments())).equations if e.primitive == "dot_general"]
    assert products[0].source.outvars[0].aval.shape == (*TOKENS[:2], 3, WIDTH)


def test_a_few_tokens_do_not_reshape_a_weight() -> None:
    w, b, x = arguments()
    traced = trace(step(split_projections), (w, b, x[:1, :4]))
    assert factored(traced) is traced


def test_a_cut_that_no_weight_makes_stays() -> None:
    """Rotary embeddings cut a dim of the queries in two, which no product with a weight could split."""

    def rotated(w: Array, b: Array, x: Array) -> Array:
        q = (x @ w).reshape(*x.shape[:2], 6, 16)
        return jnp.concatenate([-q[..., 8:], q[..., :8]], -1)

    traced = trace(step(rotated), arguments())
    assert factored(traced) is traced


def test_rewritten_equations_keep_their_place() -> None:
    traced = trace(step(split_projections), arguments())
    after = factored(traced)
    assert {e.path for e in after.equations} == {e.path for e in traced.equations}
    lines = {jax_compat.user_source(e.source) for e in traced.equations}
    assert {jax_compat.user_source(e.source) for e in after.equations} <= lines
    phases = Counter(e.phase for e in after.equations)
    assert phases["forward"] and phases["backward"]


# -- loops and branches ------------------------------------------------------------------------


def layer(x: Array, weights: tuple[Array, Array]) -> tuple[Array, None]:
    return split_projections(*weights, x) + x, None


def scanned(w: Array, b: Array, x: Array) -> Array:
    """Three layers, each with weights of its own."""
    return lax.scan(layer, x, (jnp.stack([w, 0.5 * w, -w]), jnp.stack([b, b, b])))[0]


def scanned_again(w: Array, b: Array, x: Array) -> Array:
    """Recomputed, with one weight for all trips."""
    return lax.scan(lambda y, _: jax.checkpoint(layer)(y, (w, b)), x, None, length=3)[0]


def branched(w: Array, b: Array, x: Array) -> Array:
    """Two branches that reshape one weight, each for itself."""
    return lax.cond(b.sum() > 0, split_projections, lambda w, b, x: sliced_projections(w, b, jnp.tanh(x)), w, b, x)


REGIONS = (scanned, scanned_again, branched)


@pytest.mark.parametrize("layout", REGIONS)
def test_a_section_sees_two_dims_and_its_borders_one(layout: Callable[..., Array]) -> None:
    traced = trace(step(layout), arguments())
    after = factored(traced)
    assert wide_cuts(traced) and not wide_cuts(after)
    pieces = [[(e.piece, e.repeat) for e in one.equations if e.piece] for one in (traced, after)]
    assert pieces[0] == pieces[1] and len(after.repeats) == len(after.avals)
    for region, before in zip(after.regions, traced.regions, strict=True):
        assert region.kind == before.kind
        spans = [region.enter, *region.sections, region.exit]
        assert all(one[1] == other[0] for one, other in itertools.pairwise(spans) if region.sections)
        assert all(after.equations[n].piece for span in (region.enter, region.exit) for n in range(*span))
    for equation in after.equations:
        assert equation.piece or all(after.repeats[value] == equation.repeat for value in equation.results)
    check(graph_of(after, ()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", REGIONS)
def test_any_plan_of_a_loop_computes_what_the_step_does(layout: Callable[..., Array]) -> None:
    w, b, x = arguments()
    args = (w / WIDTH**0.5, b, x)  # or the attention of three layers amplifies each rounding
    expected = jax.tree.leaves(step(layout)(*args))
    for seed in range(2):
        run = autopar.parallelize(step(layout), mesh="2x4", hardware="h100-sxm", donate=(), solver=AnyChoice(seed))
        for ours, theirs in zip(jax.tree.leaves(run(*args)), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(np.abs(theirs).max()))


# -- planned -----------------------------------------------------------------------------------


def by_head(batch: int) -> tuple[programs.Program, Any]:
    """A GPT block with fused projections, planned for 4 devices on one axis."""
    sizes = programs.GPTSizes(seq=128, dropout_rate=0.0, num_layers=1, vocab=32)
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("model",), axis_types=types, devices=jax.devices()[:4])
    program = programs.gpt(batch=batch, sizes=sizes, optimizer="sgd")
    return program, autopar.parallelize(mesh=mesh, hardware=PROFILE)(program.step)


def test_attention_is_split_by_head_and_only_weights_move() -> None:
    """One sequence, so no batch to split: Megatron's four all-reduces, and gathers of the fused weight, its bias and the vocabulary."""
    program, planned = by_head(batch=1)
    plan = planned.plan(*program.abstract_args())
    reduced = [use for use in plan.collectives if use.kind == "all-reduce"]
    moved = [use for use in plan.collectives if use.kind != "all-reduce"]
    assert len(reduced) == 4 and {use.num_bytes for use in reduced} == {128 * 64 * 4.0}
    fused, bias, table = 64 * 3 * 64 * 4, 3 * 64 * 4, 32 * 64 * 4
    assert {(use.kind, use.num_bytes) for use in moved} == {("all-gather", size) for size in (fused, bias, table)}
    counts = hlo.count(planned.lower(*program.abstract_args()).compile().as_text() or "")
    assert counts["all-reduce"] == 4 and counts["all-gather"] == len(moved) == 3
    assert "all-to-all" not in counts and "collective-permute" not in counts


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 16])
def test_both_forms_run_and_compute_the_same(batch: int) -> None:
    """With one sequence the plan splits heads, and gathers weights; with many it splits the batch, and equations run as written."""
    program, planned = by_head(batch)
    state = jax.jit(program.create_state)(jax.random.key(0))
    expected_state, expected_loss = jax.jit(program.step)(state, program.make_batch(0))
    text = planned.lower(*program.abstract_args()).compile().as_text() or ""
    assert ("all-gather" in hlo.count(text)) is (batch == 1)
    got_state, got_loss = planned(state, program.make_batch(0))
    np.testing.assert_allclose(got_loss, expected_loss, rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(got_state.params), jax.tree.leaves(expected_state.params), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 16])
def test_a_plan_that_splits_no_two_dims_is_of_the_program_as_it_was_written(batch: int) -> None:
    program, planned = by_head(batch)
    plan, traced = planned.planned(*program.abstract_args())
    assert plan.program == traced.signature and (traced.whole is not None) is (batch == 1)


def test_a_loop_that_is_not_split_is_compiled_as_it_was_written() -> None:
    """The same under a plan of the program that sees it as two, as where another loop is split."""
    program, _ = by_head(batch=16)
    args = program.abstract_args()
    traced = program_of(program.step, args, carry=None, donate=None)
    assert traced.whole is not None
    texts = []
    for form in (dataclasses.replace(traced, whole=None), traced.whole):
        plan = plan_program(form, mesh="model=4", hardware=PROFILE)
        jitted = execute.jit_plan(plan, form.trace, execute.abstract_mesh(plan.mesh))
        texts.append(execute.lower_for("cpu", jitted, args).as_text())
    assert operations(texts[0]) == operations(texts[1])


def operations(text: str) -> Counter[str]:
    """How often a lowered program does what, to which types."""
    found = re.findall(r"= stablehlo\.(\w+).*? : (.*)$", text, re.M)
    return Counter(f"{name} {types}" for name, types in found)
