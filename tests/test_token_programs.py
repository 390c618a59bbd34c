"""Steps in slices of tokens: equal to the step, and refused where tokens look ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import MicrobatchError
from autopar.frontend.equations import LiteralOperand
from autopar.frontend.trace import Trace
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.token_slices import in_token_slices, model_tokens
from autopar.transforms.program import program_of

TOKENS, WIDTH, WORDS = 7, 8, 11
Mix = Callable[[Any, jax.Array], jax.Array]


def _params(seed: int = 0) -> dict[str, jax.Array]:
    shapes = {"words": (WORDS, WIDTH), "places": (TOKENS, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WORDS)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _qkv(params: Any, x: jax.Array) -> list[jax.Array]:
    return jnp.split(x @ params["qkv"], 3, axis=-1)


def causal(params: Any, x: jax.Array, fill: float = -jnp.inf, *, mask: Any = None) -> jax.Array:
    q, k, v = _qkv(params, x)
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    at = jnp.arange(x.shape[1])
    scores = jnp.where(at[:, None] >= at if mask is None else mask, scores, fill)
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


def transposed(params: Any, x: jax.Array) -> jax.Array:
    """Scores of keys by queries."""
    q, k, v = _qkv(params, x)
    at = jnp.arange(x.shape[1])
    scores = jnp.where(at[:, None] <= at, jnp.einsum("bkd,bqd->bkq", k, q), -1e9)
    return x + jnp.einsum("bkq,bkd->bqd", jax.nn.softmax(scores, axis=1), v)


def additive(params: Any, x: jax.Array) -> jax.Array:
    q, k, v = _qkv(params, x)
    bias = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2)) > 0, 0.0, jnp.finfo(jnp.float32).min)
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) + bias), v)


def multiplied(params: Any, x: jax.Array) -> jax.Array:
    """Attention without softmax."""
    q, k, v = _qkv(params, x)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) * jnp.tril(jnp.ones((x.shape[1],) * 2))
    return x + jnp.einsum("bqk,bkd->bqd", scores, v)


def windowed(params: Any, x: jax.Array) -> jax.Array:
    at = jnp.arange(x.shape[1])
    return causal(params, x, mask=(at[:, None] >= at) & (at[:, None] - at < 3))


def shifted(params: Any, x: jax.Array) -> jax.Array:
    """Each token sees the one before it."""
    return x + jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))) @ params["qkv"][:, :WIDTH]


def rematerialized(params: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(causal)(params, x)


def twice(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(windowed(params, additive(params, causal(params, x))))


def one_ahead(params: Any, x: jax.Array) -> jax.Array:
    """Each token sees the next one, but no others: exact, though a slice waits for a token of the next one."""
    return x + jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0))) @ params["qkv"][:, :WIDTH]


def _step(mix: Mix) -> Callable[..., Any]:
    def step(params: Any, tokens: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            x = params["words"][tokens] + params["places"]
            logits = mix(params, x) @ params["out"]
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
            return -chosen.mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def _traced(step: Callable[..., Any], *args: Any) -> Any:
    program = program_of(step, args, carry=None, donate=None)
    return program.as_traced.whole or program.as_traced


def _run(trace: Trace, leaves: Sequence[Any]) -> list[Any]:
    values: dict[int, Any] = {**dict(zip(trace.inputs, leaves, strict=True)), **dict(trace.constants)}

    def read(atom: Any) -> Any:
        return atom.value if isinstance(atom, LiteralOperand) else values[atom]

    for equation in trace.equations:
        operands = [read(atom) for atom in equation.operands]
        assert equation.piece in (None, "barrier")
        results = operands if equation.piece else jax_compat.bind(equation.source, operands)
        values.update(zip(equation.results, results, strict=True))
    return [read(atom) for atom in trace.outputs]


TOKEN_BATCH = np.random.default_rng(0).integers(0, WORDS, (3, TOKENS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lengths", [(7,), (4, 3), (1, 5, 1), (1,) * 7])
@pytest.mark.parametrize(
    "mix", [causal, transposed, additive, multiplied, windowed, shifted, rematerialized, twice, one_ahead]
)
def test_slices_compute_the_step(mix: Mix, lengths: tuple[int, ...]):
    form = _traced(_step(mix), _params(), TOKEN_BATCH)
    sliced = in_token_slices(form.trace, form.graph, lengths)
    leaves = [*jax.tree.leaves(_params()), TOKEN_BATCH]
    for one, other in zip(_run(sliced, leaves), _run(form.trace, leaves), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert {one.token_slice for one in sliced.equations} == set(range(len(lengths)))


def _times(trace: Trace, count: int) -> dict[int, int]:
    """The time of each equation: forward slices, then backward slices from the last to the first."""
    backward: set[int] = set()
    found: dict[int, int] = {}
    for n, one in enumerate(trace.equations):
        if one.phase == "backward" or any(v in backward for v in one.reads):
            backward.update(one.results)
        found[n] = 2 * count - 1 - one.token_slice if backward.issuperset(one.results) else one.token_slice
    return found


@pytest.mark.parametrize("mix", [causal, transposed, additive, multiplied, windowed, shifted, rematerialized, twice])
def test_every_value_is_ready_when_it_is_read(mix: Mix):
    form = _traced(_step(mix), _params(), TOKEN_BATCH)
    sliced = in_token_slices(form.trace, form.graph, (3, 2, 2))
    times, made = _times(sliced, 3), sliced.producers
    for n, one in enumerate(sliced.equations):
        assert all(times[made[v]] <= times[n] for v in one.reads if v in made), one.primitive


@pytest.mark.sampled(3)
@pytest.mark.parametrize("token", range(1, TOKENS))
@pytest.mark.parametrize("mix", [causal, transposed, additive, windowed, shifted, twice])
def test_nan_probe(mix: Mix, token: int):
    """The forward pass of earlier slices computes nothing from a token's NaN: no value of theirs has one."""
    form = _traced(_step(mix), _params(), TOKEN_BATCH)
    sliced = in_token_slices(form.trace, form.graph, (token, TOKENS - token))
    params = _params()
    places = params["places"].at[token:].set(jnp.nan)
    values: dict[int, Any] = dict(zip(sliced.inputs, jax.tree.leaves({**params, "places": places}), strict=False))
    values.update({sliced.inputs[-1]: TOKEN_BATCH, **dict(sliced.constants)})
    state = set(sliced.inputs[:-1])
    num_checked = 0
    times = _times(sliced, 2)
    for n, one in enumerate(sliced.equations):
        operands = [atom.value if isinstance(atom, LiteralOperand) else values[atom] for atom in one.operands]
        results = operands if one.piece else jax_compat.bind(one.source, operands)
        values.update(zip(one.results, results, strict=True))
        reads_tokens = (
            any(v in made_of_rows for v in one.reads) if (made_of_rows := state - set(sliced.inputs)) else False
        )
        if reads_tokens or one.primitive == "gather":
            state.update(one.results)
        if times[n] == 0 and reads_tokens:
            num_checked += 1
            assert not any(np.isnan(np.asarray(r, np.float64)).any() for r in results if r.dtype == jnp.float32), one
    assert num_checked > 5


def test_nan_probe_of_the_whole_step():
    """The same NaN reaches the loss, so that the probe above could fail."""
    params = _params()
    params["places"] = params["places"].at[3:].set(jnp.nan)
    assert np.isnan(_step(causal)(params, TOKEN_BATCH)[1])


def bidirectional(params: Any, x: jax.Array) -> jax.Array:
    q, k, v = _qkv(params, x)
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


def anticausal(params: Any, x: jax.Array) -> jax.Array:
    at = jnp.arange(x.shape[1])
    return causal(params, x, mask=at[:, None] <= at)


def two_ahead_masked(params: Any, x: jax.Array) -> jax.Array:
    """A mask that is off by one."""
    at = jnp.arange(x.shape[1])
    return causal(params, x, mask=at[:, None] + 1 >= at)


def masked_softly(params: Any, x: jax.Array) -> jax.Array:
    return causal(params, x, fill=-3.0)


def masked_to_zero_before_softmax(params: Any, x: jax.Array) -> jax.Array:
    return causal(params, x, fill=0.0)


def masked_wholly(params: Any, x: jax.Array) -> jax.Array:
    """The first row has no element left, so its softmax is even over all tokens."""
    at = jnp.arange(x.shape[1])
    return causal(params, x, fill=-1e9, mask=at[:, None] > at)


def flipped(params: Any, x: jax.Array) -> jax.Array:
    return x + x[:, ::-1] @ params["qkv"][:, :WIDTH]


def averaged(params: Any, x: jax.Array) -> jax.Array:
    return x + x.mean(axis=1, keepdims=True)


def normalized(params: Any, x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def rolled(params: Any, x: jax.Array) -> jax.Array:
    return x + jnp.roll(x, 1, axis=1)


def summed(params: Any, x: jax.Array) -> jax.Array:
    """A cumulative sum looks back only, but its rule does not say so: refused, not wrong."""
    return x + jnp.cumsum(x, axis=1)


def linear(params: Any, x: jax.Array) -> jax.Array:
    q, k, v = _qkv(params, x)
    return x + q @ jnp.einsum("bkd,bke->bde", k, v)


@pytest.mark.parametrize(
    ("mix", "operation"),
    [
        (bidirectional, "dot_general"),
        (anticausal, "dot_general"),
        (two_ahead_masked, "dot_general"),
        (masked_softly, "dot_general"),
        (masked_to_zero_before_softmax, "dot_general"),
        (masked_wholly, "dot_general"),
        (flipped, "rev"),
        (averaged, "reduce_sum"),
        (normalized, "reduce_sum"),
        (rolled, "concatenate"),
        (summed, "cumsum"),
        (linear, "dot_general"),
    ],
)
def test_a_step_that_looks_ahead_is_refused(mix: Mix, operation: str):
    form = _traced(_step(mix), _params(), TOKEN_BATCH)
    with pytest.raises(MicrobatchError, match=rf"`{operation}` .*test_token_programs\.py:\d+ .*looks ahead"):
        in_token_slices(form.trace, form.graph, (4, 3))


def test_lengths_that_do_not_add_up():
    form = _traced(_step(causal), _params(), TOKEN_BATCH)
    with pytest.raises(MicrobatchError, match=r"slices of \[4, 4\] tokens make 8 tokens, but the model has 7"):
        in_token_slices(form.trace, form.graph, (4, 4))
    assert model_tokens(form.trace, form.graph) == TOKENS


def test_a_batch_without_tokens():
    def step(weights: jax.Array, x: jax.Array) -> Any:
        return weights - jax.grad(lambda w: ((x * w.sum()) ** 2).mean())(weights), x.sum()

    form = _traced(step, jnp.ones(3), jnp.ones(8))
    with pytest.raises(MicrobatchError, match="no dim of tokens"):
        in_token_slices(form.trace, form.graph, (4, 4))
