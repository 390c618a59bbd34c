"""Gradient accumulation: unchanged results, gradients reduced once, and errors for a batch that cannot be split."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_choice import AnyChoice
from jax import lax
from same_steps import QUICKLY, assert_same, train

import autopar
from autopar.errors import BudgetError, MicrobatchError
from autopar.pipeline.plan_files import load_plan
from autopar.plans.plan import Plan
from autopar.report.explain import explain
from autopar.transforms.microbatch.batch_dims import Place, Places
from autopar.transforms.microbatch.classify import classify
from autopar.transforms.program import Program, program_of
from autopar.xla_compiler.compiler import Compiler
from benchmarks.zoo import small
from tests.planned import plan_program

Array = jax.Array
WIDTH, ROWS, SEQ, WORDS = 16, 32, 6, 24
TOLERANCE = 1e-5
LAYERS = 4


def normal(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def weights(count: int) -> list[Array]:
    return [normal(i, WIDTH, WIDTH) / WIDTH**0.5 for i in range(count)]


def batch() -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {
        "x": normal(8, ROWS, WIDTH),
        "y": normal(9, ROWS, WIDTH),
        "mask": jnp.asarray(rng.integers(0, 2, ROWS), jnp.float32),
        "tokens": jnp.asarray(rng.integers(0, WORDS, (ROWS, SEQ))),
    }


def optimizer(clip: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(1e-2))


def begin(params: Any) -> Any:
    return params, optimizer(1.0).init(params)


def stepped(loss: Callable[..., Any], clip: float = 1e9) -> Callable[..., Any]:
    """A train step of a loss that returns `(loss, anything else)`, with clipping by the norm of all gradients."""
    tx = optimizer(clip)

    def step(state: Any, data: Any) -> Any:
        params, opt_state = state
        (value, more), grads = jax.value_and_grad(loss, has_aux=True)(params, data)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value, more, grads

    return step


def mlp(params: list[Array], data: Any) -> Any:
    x = data["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - data["y"]) ** 2), None


def masked(params: list[Array], data: Any) -> Any:
    """Divided by how many examples count, which depends on the data alone; with an output for each example."""
    x = jnp.tanh(data["x"] @ params[0]) @ params[1]
    each = jnp.mean((x - data["y"]) ** 2, -1) * data["mask"]
    return jnp.sum(each) / jnp.maximum(jnp.sum(data["mask"]), 1.0), (x, each, jnp.max(each))


def with_dropout(params: list[Array], data: Any) -> Any:
    x = data["x"]
    for i, w in enumerate(params):
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(5), i), 0.7, x.shape)
        x = jnp.where(kept, jnp.tanh(x @ w) / 0.7, 0.0)
    return jnp.mean((x - data["y"]) ** 2), None


def scanned(params: list[Array], data: Any) -> Any:
    """Layers in a loop, recomputed, with dropout in it."""

    def block(carry: Any, w: Array) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        y = jnp.where(jax.random.bernoulli(own, 0.8, x.shape), jnp.tanh(x @ w), 0.0) + x
        return (y, key), jnp.mean(y**2)

    start = (data["x"], jax.random.PRNGKey(3))
    (x, _), sizes = lax.scan(jax.checkpoint(block), start, jnp.stack(params))
    return jnp.mean((x - data["y"]) ** 2) + 0.1 * jnp.sum(sizes), None


def language(params: list[Array], data: Any) -> Any:
    """Batch and sequence in one dim, tied embeddings, a causal mask, a look-up of labels."""
    embedding = jnp.concatenate([params[0], params[1][:8]])
    tokens = data["tokens"]
    x = embedding[tokens] + jnp.sin(jnp.arange(SEQ, dtype=jnp.float32))[:, None]
    h = (x.reshape(ROWS * SEQ, WIDTH) @ params[2]).reshape(ROWS, SEQ, 2, WIDTH // 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", h, h)
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
    h = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), h).reshape(ROWS, SEQ, WIDTH)
    logits = jax.nn.log_softmax((x + h) @ embedding.T)
    each = -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)
    return jnp.mean(each), jnp.argmax(logits, -1)


def convolved(params: list[Array], data: Any) -> Any:
    """Images, a convolution of the batch as channels in its gradient, a pooling."""
    images = data["x"].reshape(ROWS, 4, 4, 1)
    kernel = params[0][:3, :6].reshape(3, 1, 1, 6) * jnp.ones((1, 3, 1, 1))
    x = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean((x.reshape(ROWS, -1)[:, :WIDTH] @ params[1] - data["y"]) ** 2), None


def branching(params: list[Array], data: Any) -> Any:
    x = lax.cond(jnp.sum(params[0]) > 0, lambda x: jnp.tanh(x @ params[1]), lambda x: x @ params[0], data["x"])
    return jnp.mean((x - data["y"]) ** 2), None


def in_bfloat16(params: list[Array], data: Any) -> Any:
    x = data["x"].astype(jnp.bfloat16)
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.bfloat16))
    return jnp.mean((x.astype(jnp.float32) - data["y"]) ** 2), None


def recurrent(params: list[Array], data: Any) -> Any:
    """Weights shared by all steps of a loop: their gradient is a sum within a sum."""

    def cell(h: Array, t: Array) -> Any:
        h = jnp.tanh(h @ params[0] + t[:, None] * params[1][0])
        return h, h

    h, _ = lax.scan(cell, data["x"], data["tokens"].T.astype(jnp.float32) / WORDS)
    return jnp.mean((h - data["y"]) ** 2), None


LOSSES = [mlp, masked, with_dropout, scanned, language, convolved, branching, recurrent]


def assert_close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(leaf, np.float64) for leaf in (one, other))
        assert np.linalg.norm(a - b) <= tolerance * (np.linalg.norm(b) + 1e-3), (a.shape, np.linalg.norm(a - b))


def traced(step: Callable[..., Any], *args: Any) -> Program:
    return program_of(step, args, carry=None, donate=None)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_any_plan_in_microbatches_computes_what_the_step_does(loss: Callable[..., Any], mesh: str) -> None:
    """Loss, gradients, outputs of examples, and what a first step leaves of the optimizer's state: by the best plan on
    one mesh, by any plan on the other."""
    step, args = stepped(loss, clip=0.1), (begin(weights(3)), batch())
    count, solver = (2, None) if mesh == "8" else (4, AnyChoice(0))
    options: dict[str, Any] = {"mesh": mesh, "hardware": "h100-sxm", "donate": (), "num_microbatches": count}
    run = autopar.parallelize(step, solver=solver, **options)
    made = run.plan(*args)
    assert made.microbatches is not None and made.microbatches.count == count
    compiled = run.lower(*args).compile(QUICKLY)
    (_, state), *others = compiled(*jax.device_put(args, compiled.input_shardings[0]))
    (_, state_unsplit), *wanted = unsplit(loss)
    assert_close(others, wanted)
    assert_close(state[1][0].mu, state_unsplit[1][0].mu)


@cache
def unsplit(loss: Callable[..., Any]) -> Any:
    args = (begin(weights(3)), batch())
    return jax.jit(stepped(loss, clip=0.1)).lower(*args).compile(QUICKLY)(*args)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "lstm", "whisper"])
def test_a_real_model_trains_as_it_does_unsplit(model: str) -> None:
    training = getattr(small, model)()
    assert_same(train(training, mesh="2x4", num_microbatches=2), train(training))


def test_narrow_gradients_are_accumulated_in_float32() -> None:
    step = stepped(in_bfloat16)
    args = (begin(weights(2)), batch())
    program = traced(step, *args).in_microbatches(4)
    (loop,) = program.graph.loops
    assert {program.graph.values[program.graph.nodes[enter].results[0]].dtype for enter, _ in loop.carries} == {
        "float32"
    }
    run = autopar.parallelize(step, mesh="8", hardware="h100-sxm", donate=(), num_microbatches=4)
    assert_close(run(*args)[3], jax.jit(step)(*args)[3], tolerance=1e-2)


def test_nothing_in_the_loop_is_as_large_as_the_batch() -> None:
    """Neither activations nor the random bits of a dropout."""
    for loss in (with_dropout, scanned):
        step = stepped(loss)
        program = traced(step, begin(weights(3)), batch()).in_microbatches(4)
        values, outer = program.graph.values, program.graph.loops[-1]
        inside = [v for node in program.graph.nodes[outer.start : outer.stop] for v in node.results]
        large = [values[v].shape for v in inside if ROWS in values[v].shape and values[v].repeat >= 4]
        assert not large


def test_each_tensor_is_summed_once_and_two_gradients_of_one_weight_in_one_accumulator() -> None:
    def tied(params: list[Array], data: Any) -> Any:
        return jnp.mean((jnp.tanh(data["x"] @ params[0]) @ params[0].T - data["y"]) ** 2), None

    step = stepped(tied)
    program = traced(step, begin(weights(1)), batch()).in_microbatches(2)
    (loop,) = program.graph.loops
    shapes = [program.graph.values[program.graph.nodes[enter].results[0]].shape for enter, _ in loop.carries]
    assert sorted(shapes) == [(), (WIDTH, WIDTH)]
    assert loop.sums == loop.carries


# -- where the batch stands -------------------------------------------------------------------


def test_the_batch_is_followed_through_merged_dims() -> None:
    def step(w: Array, tokens: Array) -> tuple[Array, Array]:
        x = w[tokens]  # [ROWS, SEQ, WIDTH]
        merged = x.reshape(ROWS * SEQ, WIDTH) @ w[:WIDTH]
        turned = jnp.swapaxes(x, 0, 1).reshape(SEQ * ROWS, WIDTH)
        return w * 0.9, jnp.sum(merged) + jnp.sum(turned)

    graph = traced(step, normal(0, WORDS, WIDTH), batch()["tokens"]).graph
    found = Places(graph).batch()
    assert (found.size, found.inputs) == (ROWS, (1,))
    merged = [found.places[v] for v, info in enumerate(graph.values) if info.shape == (ROWS * SEQ, WIDTH)]
    assert {frozenset([Place(0, SEQ)]), frozenset([Place(0, 1)])} == set(merged)


def test_what_depends_on_the_data_alone_is_computed_before() -> None:
    program = traced(stepped(masked), begin(weights(2)), batch())
    split = classify(program.trace, program.graph)
    early = [program.graph.nodes[n] for n in split.before if program.graph.nodes[n].primitive == "reduce_sum"]
    assert len(early) == 1 and not split.own
    later = {program.graph.nodes[n].phase for n in split.after}
    assert "update" in later


# -- refusals ---------------------------------------------------------------------------------


def normalised(params: list[Array], data: Any) -> Any:
    x = data["x"] @ params[0]
    x = (x - jnp.mean(x, 0)) * lax.rsqrt(jnp.var(x, 0) + 1e-5)
    return jnp.mean((jnp.tanh(x) @ params[1] - data["y"]) ** 2), jnp.mean(x)


def contrastive(params: list[Array], data: Any) -> Any:
    scores = (data["x"] @ params[0]) @ (data["y"] @ params[1]).T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores))), None


def sorted_rows(params: list[Array], data: Any) -> Any:
    return jnp.mean(jnp.sort(data["x"] @ params[0], 0) * data["y"]), None


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            normalised,
            r"`sub` .*test_microbatches.py:\d+ .* takes the result of `reduce_sum`.*reduction over all 32 examples.*per_microbatch_statist",
        ),
        (contrastive, r"`dot_general` at .*test_microbatches.py:\d+ .*each example meets all others"),
        (sorted_rows, r"`sort` near .*does not run on a part of the 32 examples"),
    ],
)
def test_examples_that_meet_are_refused_by_name(loss: Callable[..., Any], words: str) -> None:
    step = stepped(loss)
    with pytest.raises(MicrobatchError, match=words):
        autopar.plan(step, begin(weights(2)), batch(), mesh="8", hardware="h100-sxm", num_microbatches=2)


def test_batch_statistics_of_each_microbatch_where_the_user_allows_them() -> None:
    """As if a program ran over the microbatches and took the mean: of the loss, of gradients, of the statistics."""
    step, count = stepped(normalised), 4
    args = (begin(weights(2)), batch())
    options: dict[str, Any] = {"mesh": "2x4", "hardware": "h100-sxm", "donate": ()}
    run = autopar.parallelize(step, num_microbatches=count, per_microbatch_statistics=True, **options)
    plan = run.plan(*args)
    assert plan.microbatches is not None and plan.microbatches.own_statistics
    _, loss, _, grads = run(*args)
    parts = [jax.tree.map(lambda x, j=j: x[j::count], args[1]) for j in range(count)]
    each = [jax.value_and_grad(normalised, has_aux=True)(args[0][0], part) for part in parts]
    assert_close((loss, grads), jax.tree.map(lambda *x: sum(x) / count, *(((value), g) for (value, _), g in each)))
    assert "its own batch statistics" in str(explain(plan))


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_computed_from_statistics_is_the_mean_over_microbatches(stages: int) -> None:
    """A scale's gradient is a sum over examples times a deviation, and a running variance is a difference of squares: neither
    is that of the whole batch. The running deviation is computed before an example reads the variance, and the terms of the
    loss before the backward pass reads what they were computed from."""

    def loss_of(params: Any, data: Any) -> Any:
        x, kept = data["x"], []
        for one in params:
            x = x @ one["kernel"]
            mean, square = x.mean(0), (x**2).mean(0)
            var = square - mean**2
            new = {"mean": mean, "var": var, "deviation": jnp.sqrt(var + 1e-3)}
            kept.append({name: 0.9 * one[name] + 0.1 * value for name, value in new.items()})
            x = jnp.tanh((x - mean) * (lax.rsqrt(var + 1e-3) * one["scale"]) + one["bias"])
        off = (x - data["y"]) ** 2
        return off.mean() + 0.1 * off.max() + jax.nn.relu(2 - jnp.sqrt(x.var(0))).mean(), kept

    def step(params: Any, data: Any) -> Any:
        (loss, kept), grads = jax.value_and_grad(loss_of, has_aux=True)(params, data)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return [one | statistics for one, statistics in zip(moved, kept, strict=True)], loss

    ones = jnp.ones(WIDTH)
    rest = {"scale": ones, "bias": 0 * ones, "mean": 0 * ones, "var": ones, "deviation": ones}
    params = [{"kernel": w, **rest} for w in weights(4)]
    data = {name: array * (1 + jnp.arange(ROWS)[:, None] % 4) for name, array in batch().items() if name in "xy"}
    how: dict[str, Any] = {"stages": stages, "per_microbatch_statistics": True, "num_microbatches": 4, "cache": False}
    found = autopar.parallelize(step, **how)(params, data)
    parts = [jax.tree.map(lambda x, j=j: x[j::4], data) for j in range(4)]
    assert_close(found, jax.tree.map(lambda *x: sum(x) / 4, *(jax.jit(step)(params, part) for part in parts)))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (
            3,
            r"32 examples \(`data/mask`, .*\) cannot be split into 3 equal microbatches: choose one of 2, 4, 8, 16, 32",
        ),
        (0, r"`num_microbatches` is 0: give 1 or more"),
        ("few", r"`num_microbatches` is 'few'"),
    ],
)
def test_a_number_that_does_not_fit(count: Any, words: str) -> None:
    step = stepped(mlp)
    with pytest.raises(MicrobatchError, match=words):
        autopar.plan(step, begin(weights(1)), batch(), mesh="8", hardware="h100-sxm", num_microbatches=count)


def test_a_step_without_data_has_no_batch() -> None:
    with pytest.raises(MicrobatchError, match="no batch to split into microbatches"):
        autopar.plan(lambda w: w * 2, normal(0, 64, 64), mesh="8", hardware="h100-sxm", num_microbatches=2)


# -- plans ------------------------------------------------------------------------------------


def large() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step whose activations are most of its memory."""

    def loss(params: Any, data: Any) -> Any:
        x = data
        for w in params:
            x = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32) ** 2), None

    step = stepped(loss)
    params = [jax.ShapeDtypeStruct((512, 512), "float32")] * LAYERS

    def train_step(state: Any, data: Any) -> Any:
        state, value, _, _ = step(state, data)
        return state, value

    return train_step, (jax.eval_shape(begin, params), jax.ShapeDtypeStruct((65536, 512), "float32"))


def planned(**options: Any) -> Plan:
    step, args = large()
    return autopar.plan(step, *args, mesh="8", hardware="h100-sxm", **options)


def gradient_sums(plan: Plan) -> list[int]:
    """How often each gradient is summed."""
    return [use.num_times for use in plan.collectives if use.cause == "reduce the gradient"]


def test_gradients_are_summed_over_devices_once(tmp_path: Any) -> None:
    one, four = planned(), planned(num_microbatches=4)
    assert gradient_sums(four) == [1] * LAYERS
    assert four.prediction.peak_bytes < 0.7 * one.prediction.peak_bytes
    told = four.microbatches
    assert told is not None and (told.count, told.num_examples, told.num_accumulated) == (4, 65536, LAYERS + 1)
    assert told.accumulated_bytes == pytest.approx(LAYERS * 4 * 512**2, rel=1e-3)
    four.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == four
    assert re.search(r"accumulation over 4 microbatches of 16384 examples", " ".join(str(explain(four)).split()))


def test_a_loop_of_the_users_own_sums_once_too() -> None:
    def step(w: Array, x: Array) -> Array:
        def add(total: Array, part: Array) -> tuple[Array, None]:
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w)))(w), None

        total, _ = lax.scan(add, jnp.zeros_like(w), jnp.swapaxes(x.reshape(-1, 4, 1024), 0, 1))
        return w - 0.1 * total

    args = jax.ShapeDtypeStruct((1024, 1024), "float32"), jax.ShapeDtypeStruct((65536, 1024), "float32")
    plan = autopar.plan(step, *args, mesh="8", hardware="h100-sxm")
    sums = [use.num_times for use in plan.collectives if use.kind in ("all-reduce", "reduce-scatter")]
    assert sums == [1]


@pytest.mark.slow
def test_auto_takes_one_where_it_fits_and_more_where_it_does_not() -> None:
    one = planned(num_microbatches="auto")
    assert one.microbatches is None
    least = 0.35 * one.prediction.peak_bytes
    way_out = r'Ways out: .*accumulate gradients over microbatches \(`num_microbatches=\d+`, or `"auto"`; \+\d+ %\)'
    with pytest.raises(BudgetError, match=way_out):
        planned(memory_budget_bytes=least, rematerialize=False)
    plan = planned(memory_budget_bytes=least, num_microbatches="auto", rematerialize=False)
    assert plan.microbatches is not None and plan.microbatches.count > 1
    assert plan.prediction.peak_bytes <= least
    assert plan.microbatches.tried[0].count == 1
    assert "With 1 nothing fits" in " ".join(str(explain(plan)).split())


def test_a_step_that_fits_is_planned_once() -> None:
    step, args = large()
    program = traced(step, *args)
    plan_program(program, mesh="8", hardware="h100-sxm", num_microbatches="auto")
    assert not program.split


def test_a_saved_plan_runs(tmp_path: Any) -> None:
    step = stepped(masked)
    args = (begin(weights(2)), batch())
    options: dict[str, Any] = {"mesh": "8", "hardware": "h100-sxm", "donate": ()}
    autopar.plan(step, *args, num_microbatches=4, **options).save(tmp_path / "plan.json")
    assert_close(autopar.parallelize(step, plan=tmp_path / "plan.json")(*args)[1:], jax.jit(step)(*args)[1:])


@pytest.mark.slow
def test_the_compiled_program_sums_once_and_takes_as_little_memory(absent_gpus: Compiler) -> None:
    step, args = large()
    peaks: list[tuple[float, float]] = []
    for count in (1, 4):
        told = autopar.verify(step, *args, mesh="8", hardware="h100-sxm", num_microbatches=count, compiler=absent_gpus)
        assert not set(told.off) - {"peak"}, str(told)
        sums = [one for one in told.matched.compiled if one.kind in ("all-reduce", "reduce-scatter")]
        assert max(one.num_times for one in sums) == 1
        peaks.append((told.plan.prediction.peak_bytes, told.compiled.peak_bytes))
        assert peaks[-1][0] == pytest.approx(peaks[-1][1], rel=0.25)
    assert peaks[1][1] < 0.7 * peaks[0][1]
