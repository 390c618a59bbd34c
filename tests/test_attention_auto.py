"""`attention="auto"` replaces softmax(QK^T)V by a fused kernel, forward and backward, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.planner.planner import plan_program
from autopar.planner.request import PlanRequest
from autopar.transforms.attention import kernels
from autopar.transforms.program import Program, program_of

RNG = np.random.default_rng(0)
Step = Callable[..., Any]


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def gradients(attention: Step, num_args: int = 3) -> Step:
    """The gradients of a loss of an attention, by its first arguments."""

    def loss(*args: Any) -> Any:
        out = attention(*args)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)) * jnp.arange(out.shape[-1]))

    return jax.value_and_grad(loss, argnums=tuple(range(num_args)))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own attention in the place of cuDNN's, which exists on GPUs only; in float32."""

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, **options, implementation="xla")

    monkeypatch.setattr(kernels, "KERNELS", {"cudnn": attention})


def fused(step: Step, args: Any, count: int = 1) -> Program:
    """The step with a fused kernel in `count` places."""
    found = program_of(step, args, carry=(), donate=()).with_attention("cudnn")
    assert (found.count, dict(found.reasons)) == (count, {})
    assert found.program is not None
    return found.program


def check(step: Step, *args: Any, count: int = 1, mesh: str = "data=2,model=4") -> None:
    """The step gives the same results with a fused kernel."""
    plan = plan_program(fused(step, args, count), PlanRequest(mesh=mesh, hardware="h100-sxm"))
    assert plan.attention_kernel == "cudnn"
    made, expected = autopar.parallelize(step, plan=plan)(*args), jax.jit(step)(*args)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(other).max())))


B, T, N, H = 4, 64, 8, 16


def of_heads(num: int, length: int = T) -> jax.Array:
    return normal(B, length, num, H)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    """Grouped heads as an einsum, a causal mask from `arange`, and a softmax by hand."""
    b, t, _, h = q.shape
    scores = jnp.einsum("bqgrk,bsgk->bgrqs", q.reshape(b, t, k.shape[2], -1, h), k) * h**-0.5
    at = jnp.arange(t)
    scores = jnp.where(at[:, None] < at[None, :], -jnp.inf, scores)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("bgrqs,bsgk->bqgrk", weights, v).reshape(q.shape)


def of_one_example(q: Any, k: Any, v: Any) -> Any:
    """Attention of one head of one example, `[tokens, features]`, with its scale on the keys."""
    return jax.nn.softmax(q @ (k / 4).T) @ v


def masked(q: Any, k: Any, v: Any, tokens: Any) -> Any:
    """A causal mask and one of padding, as Flax combines them."""
    mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens >= 0, tokens > 0))
    return nn.dot_product_attention(q, k, v, mask=mask)


def jax_attention(**options: Any) -> Step:
    return lambda q, k, v, *more: jax.nn.dot_product_attention(q, k, v, *more, **options)


def alibi(q: Any, k: Any, v: Any) -> Any:
    """A bias by distance, with one slope per head."""
    distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)[None, :])
    slopes = 2.0 ** -jnp.arange(1, N + 1)
    return jax.nn.dot_product_attention(q, k, v, bias=-(slopes[:, None, None] * distance)[None])


def packed(q: Any, k: Any, v: Any, segments: Any) -> Any:
    """Several sequences in one: a token sees the earlier ones of its own."""
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)


TOKENS = jnp.asarray(RNG.integers(1, 9, (B, T))).at[1, 40:].set(0)
LENGTHS = jnp.asarray([64, 40, 13, 64])
FORMS: dict[str, tuple[Step, tuple[Any, ...]]] = {
    "plain": (jax_attention(), (of_heads(N), of_heads(N), of_heads(N))),
    "causal": (jax_attention(is_causal=True), (of_heads(N), of_heads(N), of_heads(N))),
    "grouped": (jax_attention(is_causal=True, scale=0.3), (of_heads(N), of_heads(2), of_heads(2))),
    "one key head": (jax_attention(), (of_heads(N), of_heads(1), of_heads(1))),
    "cross": (jax_attention(), (of_heads(N), of_heads(N, 24), of_heads(N, 24))),
    "lengths": (
        lambda q, k, v, n: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=n),
        (of_heads(N), of_heads(N), of_heads(N), LENGTHS),
    ),
    "window": (jax_attention(local_window_size=(8, 0)), (of_heads(N), of_heads(N), of_heads(N))),
    "bias": (jax_attention(), (of_heads(N), of_heads(N), of_heads(N), normal(1, N, T, T))),
    "mask": (
        lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, mask=m, is_causal=True),
        (of_heads(N), of_heads(N), of_heads(N), (TOKENS > 0)[:, None, None, :]),
    ),
    "flax": (masked, (of_heads(N), of_heads(N), of_heads(N), TOKENS)),
    "alibi": (alibi, (of_heads(N), of_heads(N), of_heads(N))),
    "packed": (packed, (of_heads(N), of_heads(N), of_heads(N), TOKENS // 3)),
    "by hand": (by_hand, (of_heads(N), of_heads(2), of_heads(2))),
    "vmapped": (jax.vmap(jax.vmap(of_one_example)), (normal(B, N, T, H), normal(B, N, T, H), normal(B, N, T, H))),
    "heads first": (
        lambda q, k, v: jnp.swapaxes(jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 4) @ v, 1, 2),
        (normal(B, N, T, H), normal(B, N, T, H), normal(B, N, T, H)),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", FORMS)
def test_results_are_equal(name: str) -> None:
    attention, args = FORMS[name]
    check(gradients(attention), *args)


@pytest.mark.usefixtures("exact")
def test_without_gradients() -> None:
    check(jax_attention(is_causal=True), *FORMS["causal"][1])


def decoder(attention: Step, *, remat: bool, scan: bool, layers: int = 3) -> Step:
    """The gradients of a stack of attention layers."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[i]) for i in range(3))
        return x + jnp.einsum("btnh,dnh->btd", attention(q, k, v), w[3]), None

    body = jax.checkpoint(layer) if remat else layer

    def loss(w: Any, x: Any) -> Any:
        if scan:
            x, _ = jax.lax.scan(body, x, w)
        else:
            for i in range(layers):
                x, _ = body(x, w[i])
        return jnp.sum(x**2)

    return jax.value_and_grad(loss, argnums=(0, 1))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_layers(remat: bool, scan: bool) -> None:
    step = decoder(jax_attention(is_causal=True), remat=remat, scan=scan)
    count = (1 if scan else 3) * (2 if remat else 1)
    check(step, 0.1 * normal(3, 4, 32, N, H), normal(B, T, 32), count=count)


@pytest.mark.usefixtures("exact")
def test_pairs_of_layers_in_a_loop() -> None:
    """Local and global layers in turn, as in many models."""

    def pair(x: Any, w: Any) -> tuple[Any, None]:
        for i, causal in enumerate((True, False)):
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, one[i]) for one in w[:3])
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
            x = x + jnp.einsum("btnh,dnh->btd", mixed, w[3][i])
        return x, None

    step = jax.value_and_grad(lambda w, x: jnp.sum(jax.lax.scan(pair, x, w)[0] ** 2), argnums=(0, 1))
    w = tuple(0.1 * normal(3, 2, 32, N, H) for _ in range(4))
    check(step, w, normal(B, T, 32), count=2)


@pytest.mark.usefixtures("exact")
def test_microbatches() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, one) for one in w)
            return jnp.mean(jnp.sin(jax.nn.dot_product_attention(q, k, v, is_causal=True)))

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - b, w, gradient), value

    args = (tuple(normal(32, N, H) for _ in range(3)), normal(8, T, 32))
    program = program_of(step, args, carry=("w",), donate=()).with_attention("cudnn").program
    assert program is not None
    plan = plan_program(program, PlanRequest(mesh="data=2,model=4", hardware="h100-sxm", num_microbatches=2))
    assert plan.num_microbatches == 2 and plan.attention_kernel == "cudnn"
    made, expected = autopar.parallelize(step, plan=plan, carry=("w",))(*args), jax.jit(step)(*args)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_a_mask_from_outside_a_loop(kind: str, remat: bool) -> None:
    mask = (TOKENS > 0)[:, None, None, :]
    given: dict[str, Any] = {"mask": mask} if kind == "mask" else {"bias": jnp.where(mask, 0.0, -1e9)}
    step = decoder(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **given), remat=remat, scan=True)
    check(step, 0.1 * normal(3, 4, 32, N, H), normal(B, T, 32), count=1 + remat)


# -- what is not replaced ------------------------------------------------------------------------


def softmax_attention(q: Any, k: Any, v: Any, of_scores: Step = lambda s: s, of_weights: Step = lambda w: w) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
    weights = of_weights(jax.nn.softmax(of_scores(scores), axis=-1))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def dropout(weights: Any) -> Any:
    return weights * jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape) / 0.9


AT = jnp.arange(T)
OTHERS: dict[str, Step] = {
    "dropout": lambda q, k, v: softmax_attention(q, k, v, of_weights=dropout),
    "soft cap": lambda q, k, v: softmax_attention(q, k, v, lambda s: 5 * jnp.tanh(s / 5)),
    "clipped": lambda q, k, v: softmax_attention(q, k, v, lambda s: jnp.minimum(s, 50.0)),
    "two softmaxes": lambda q, k, v: softmax_attention(q, k, v, of_weights=lambda w: jax.nn.softmax(w, -1)),
    "weak mask": lambda q, k, v: softmax_attention(q, k, v, lambda s: jnp.where(AT[:, None] >= AT[None, :], s, -1e4)),
    "squared scores": lambda q, k, v: softmax_attention(q, k, v, jnp.square),
    "scaled weights": lambda q, k, v: softmax_attention(q, k, v, of_weights=lambda w: 2 * w),
    "softmax over queries": lambda q, k, v: jnp.einsum(
        "bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), axis=-2), v
    ),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_not_replaced(name: str) -> None:
    args = FORMS["plain"][1]
    for step in (OTHERS[name], gradients(OTHERS[name])):
        found = program_of(step, args, carry=(), donate=()).with_attention("cudnn")
        assert found.program is None and found.count == 0


@pytest.mark.usefixtures("exact")
def test_weights_that_the_step_returns_are_computed() -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, v), weights

    assert program_of(step, FORMS["plain"][1], carry=(), donate=()).with_attention("cudnn").count == 0


@pytest.mark.usefixtures("exact")
def test_a_window_is_no_causal_mask() -> None:
    """A mask that differs from a causal one in few places is read as it is."""
    for odd in (
        lambda a, b: a >= b - 1,
        lambda a, b: a > b,
        lambda a, b: (a >= b) & (a != 50),
        lambda a, b: a >= b - 0 * a,
    ):
        step = lambda q, k, v, odd=odd: softmax_attention(  # noqa: E731
            q, k, v, lambda s: jnp.where(odd(AT[:, None], AT[None, :]), s, -1e30)
        )
        check(gradients(step), *FORMS["plain"][1])


def halves(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


LONG = halves((8, 1024, 16, 64), (8, 1024, 16, 64), (8, 1024, 16, 64))


def test_a_plan_takes_the_kernel_where_it_is_faster() -> None:
    step = gradients(jax_attention(is_causal=True))
    written = autopar.plan(step, *LONG, mesh="8", hardware="h100-sxm")
    assert written.attention_kernel is None
    assert any('`attention="auto"`' in note for note in written.notes)
    plan = autopar.plan(step, *LONG, mesh="8", hardware="h100-sxm", attention="auto")
    assert plan.attention_kernel == "cudnn"
    assert plan.prediction.step_time_s < 0.5 * written.prediction.step_time_s
    assert any("cuDNN's flash attention in 1 place" in note for note in plan.notes)
    assert autopar.Plan.from_json(plan.to_json()).attention_kernel == "cudnn"
    short = halves((8, 16, 2, 8), (8, 16, 2, 8), (8, 16, 2, 8))
    tiny = autopar.plan(step, *short, mesh="8", hardware="h100-sxm", attention="auto")
    assert any("attention run" in note for note in tiny.notes)


@pytest.mark.parametrize(
    ("hardware", "args", "reason"),
    [
        ("cpu-host", LONG, "no fused attention kernel"),
        ("v100-sxm-32", LONG, "no fused attention kernel"),
        ("h100-sxm", [jax.ShapeDtypeStruct(one.shape, jnp.float32) for one in LONG], "not in float32"),
        ("h100-sxm", halves((8, 1024, 16, 1024), (8, 1024, 16, 1024), (8, 1024, 16, 1024)), "1 place of attention"),
    ],
)
def test_a_plan_tells_why_attention_runs_as_written(hardware: str, args: Any, reason: str) -> None:
    plan = autopar.plan(gradients(jax_attention()), *args, mesh="8", hardware=hardware, attention="auto")
    assert plan.attention_kernel is None
    assert any(reason in note for note in plan.notes), plan.notes


def test_a_bias_with_more_digits_is_not_rounded() -> None:
    args = (*LONG, jax.ShapeDtypeStruct((1, 16, 1024, 1024), jnp.float32))
    found = program_of(gradients(jax_attention()), args, carry=(), donate=()).with_attention("cudnn")
    assert found.program is None and any("float32" in reason for reason in found.reasons)


def test_stages_and_exports_say_that_they_have_no_kernels() -> None:
    step = gradients(jax_attention(is_causal=True))
    plan = autopar.plan(step, *LONG, mesh="8", hardware="h100-sxm", attention="auto")
    with pytest.raises(AutoparError, match="attention"):
        autopar.export(plan, step, *LONG)
    with pytest.raises(AutoparError, match="attention"):
        autopar.plan(step, *LONG, num_devices=8, hardware="h100-sxm", stages=2, attention="auto")


@pytest.mark.parametrize("value", ["fused", True, None, 1])
def test_other_values_of_the_option_are_refused(value: Any) -> None:
    with pytest.raises(AutoparError, match=r'`attention` is .*: give "auto"'):
        autopar.plan(jax_attention(), *LONG, mesh="8", hardware="h100-sxm", attention=value)
