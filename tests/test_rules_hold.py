"""The rules hold for real equations, of many small functions and of whole train steps.

A rule's factors are checked by what its primitive computes. Along a pass-through factor, one half of a result must not
change when the other half of the operands does. Along a reduction factor, the results of two halves of the operands
must combine to the whole result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from programs import PROGRAMS

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.tracing import trace
from autopar.jax_interop import compat as jax_compat
from autopar.rules.factors import DimFactors, Rule
from autopar.rules.node_view import NodeView
from autopar.rules.table import rule_for

#: (equation, its view, its rule, its operands' abstract values, None for a literal)
Case = tuple[Equation, NodeView, Rule | None, list[Any]]


def cases(function: Callable[..., Any], args: Sequence[Any]) -> Iterator[Case]:
    traced = trace(function, args)
    graph = graph_of(traced, ())
    for equation, node in zip(traced.equations, graph.nodes, strict=True):
        view = NodeView.of(node, graph)
        avals = [None if isinstance(v, LiteralOperand) else traced.avals[v] for v in equation.operands]
        yield equation, view, rule_for(view), avals


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return list(map(jnp.ones, shapes))


def gradient(function: Callable[..., Any], *args: jax.Array, indices: Sequence[jax.Array] = ()) -> Any:
    """`function(*args, *indices)` summed and differentiated by `args`, and `args` and `indices`."""

    def total(*all_args: jax.Array) -> jax.Array:
        return jnp.asarray(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(function(*all_args))))

    return jax.value_and_grad(total, argnums=tuple(range(len(args)))), (*args, *indices)


def conv(x: jax.Array, w: jax.Array, *, stride: int = 1, groups: int = 1, dilation: int = 1) -> jax.Array:
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", rhs_dilation=(dilation, dilation), **options)


def pools(x: jax.Array) -> Any:
    return nn.max_pool(x, (2, 2), (2, 2)), nn.avg_pool(x, (2, 2), (2, 2)), lax.cumsum(x, 1), jax.nn.standardize(x)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)


def look_ups(table: jax.Array, rows: jax.Array, ids: jax.Array) -> Any:
    return table[ids], jnp.take_along_axis(rows, ids, axis=1), jnp.take_along_axis(rows, ids[:, :1], axis=0)


def updates(x: jax.Array, rows: jax.Array, ids: jax.Array) -> Any:
    set_, added, largest = x.at[ids].set(rows), x.at[ids].add(rows), x.at[ids].max(rows)
    columns = x.at[:, ids].add(1.0), x.at[:, ids].multiply(2.0), jax.ops.segment_sum(rows, ids, 8)
    window = lax.dynamic_update_slice(x, lax.dynamic_slice(x, (ids[0], 0), (2, 6)), (ids[0], 0))
    return set_, added, largest, columns, window, jax.vmap(lambda row, i: row.at[i].add(1.0))(x[:4], ids)


def shapes(x: jax.Array) -> Any:
    split, joined, padded = jnp.split(x, 2, axis=1), jnp.concatenate([x, x], axis=0), jnp.pad(x, ((0, 0), (1, 2)))
    cut = x[:, ::2], x[1:], x[:, None, 2:3]
    tiled = jnp.tile(x, (2, 1)), jnp.repeat(x, 2, axis=0), jnp.stack([x, x], 1), jnp.flip(x, 1), jnp.roll(x, 1, axis=0)
    return split, joined, padded, cut, tiled, x.reshape(2, 2, 6), x.reshape(4, 3, 2), x.reshape(-1), x.reshape(6, 4)


def orders(x: jax.Array) -> Any:
    ranked = jnp.sort(x), jnp.argsort(x, axis=0), lax.top_k(x, 2), lax.sort((x, x), dimension=0, num_keys=1)
    ranked += lax.approx_max_k(x, 2), jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.median(x, axis=1)
    scans = [scan(x, 1) for scan in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)]
    return ranked, scans, jnp.prod(x, 0), x.max(1), x.min(), (x > 0).all(0), (x > 1).any(1), jnp.var(x, 1)


def numbers(x: jax.Array) -> Any:
    smooth = nn.gelu(x), nn.silu(x), nn.softplus(x), jnp.arctan2(x, x), lax.rsqrt(x), x**3, x**0.5
    cut = jnp.clip(x, 0, 1), jnp.round(x), jnp.mod(x, 0.3), jnp.sign(x), lax.reduce_precision(x, 5, 10)
    bits = lax.bitcast_convert_type(x, jnp.int16), lax.population_count(x.astype(jnp.uint32)), x.astype(jnp.bfloat16)
    return smooth, cut, bits, jax.nn.one_hot(jnp.argmax(x, 1), 6), lax.optimization_barrier((x, x))


def randomness(key: jax.Array, x: jax.Array) -> Any:
    one, two = jax.random.split(key)
    dropped = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": one})
    return dropped, jax.random.normal(two, (4, 6)), jax.random.categorical(jax.random.fold_in(key, 1), x)


def cross_entropy_step(params: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss(params: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(x @ params, labels).mean()

    changes, state = tx.update(jax.grad(loss)(params), tx.init(params), params)
    return optax.apply_updates(params, changes), state


IDS = jnp.zeros((4, 3), jnp.int32)
IMAGE = (4, 8, 8, 6)
SNIPPETS: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "conv": gradient(conv, *arrays(IMAGE, (3, 3, 6, 4))),
    "conv_strided": gradient(partial(conv, stride=2), *arrays(IMAGE, (3, 3, 6, 4))),
    "conv_dilated": gradient(partial(conv, dilation=2), *arrays(IMAGE, (3, 3, 6, 4))),
    "conv_grouped": gradient(partial(conv, groups=2), *arrays(IMAGE, (3, 3, 3, 8))),
    "conv_depthwise": gradient(partial(conv, groups=6), *arrays(IMAGE, (3, 3, 1, 6))),
    "conv_depthwise_multiplied": gradient(partial(conv, groups=6), *arrays(IMAGE, (3, 3, 1, 12))),
    "pools": gradient(pools, *arrays((2, 4, 4, 2))),
    "attention": gradient(attention, *arrays((2, 4, 2, 6), (2, 4, 2, 6), (2, 4, 2, 6))),
    "look_ups": gradient(look_ups, *arrays((8, 6), (4, 8)), indices=[IDS]),
    "updates": gradient(updates, *arrays((8, 6), (4, 6)), indices=[IDS[:, 0]]),
    "shapes": gradient(shapes, *arrays((4, 6))),
    "orders": (orders, arrays((4, 6))),
    "numbers": (numbers, arrays((4, 6))),
    "randomness": (randomness, [jax.random.key(0), jnp.ones((4, 6))]),
    "legacy_key": (lambda key: jax.random.normal(jax.random.split(key)[0], (4,)), [jax.random.PRNGKey(0)]),
    "cross_entropy_step": (cross_entropy_step, [*arrays((6, 8), (4, 6)), IDS[:, 0]]),
}


def named(name: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    return SNIPPETS[name] if name in SNIPPETS else (PROGRAMS[name]().step, PROGRAMS[name]().abstract_args())


def assert_well_formed(view: NodeView, rule: Rule) -> None:
    """Every dim of every tensor is accounted for, and a reduction factor is in no result."""
    assert (len(rule.operands), len(rule.results)) == (len(view.operand_shapes), len(view.result_shapes))
    windows = {(halo.operand, halo.dim): halo.window for halo in rule.halos}
    terms = [*zip(rule.operands, view.operand_shapes, strict=True), *zip(rule.results, view.result_shapes, strict=True)]
    for t, (dims, shape) in enumerate(terms):
        for d, (factors, size) in enumerate(zip(dims, shape, strict=True)):
            loops = math.prod(rule.factors[f].size for f in factors)
            window = windows.get((t, d))
            assert not factors or (size, loops) == ((window.size, window.count) if window else (loops, loops))
        assert len({f for dim in dims for f in dim}) == sum(map(len, dims)), "a factor stands twice in one tensor"
    made = {f for dims in rule.results for dim in dims for f in dim} | {one.factor for one in rule.exchanges}
    assert {one.factor for one in rule.exchanges} <= rule.manual <= set(range(len(rule.factors)))
    read = {f for dims in rule.operands for dim in dims for f in dim}
    assert all((i in made) == (f.reduction is None) for i, f in enumerate(rule.factors))
    assert made | read == set(range(len(rule.factors))) and all(f.size > 1 for f in rule.factors)
    assert rule.flops_per_point >= 0


def assert_every_rule(function: Callable[..., Any], args: Sequence[Any]) -> None:
    found = list(cases(function, args))
    assert {view.primitive for _, view, rule, _ in found if rule is None} == set()
    for _, view, rule, _ in found:
        assert rule is not None
        assert_well_formed(view, rule)


@pytest.mark.contract
@pytest.mark.parametrize("name", [*SNIPPETS, *PROGRAMS])
def test_every_primitive_has_a_well_formed_rule(name: str) -> None:
    function, args = named(name)
    assert_every_rule(function, args)


@pytest.mark.contract
def test_hugging_face_gpt2_train_step_has_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_TORCH", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=64)
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(2, 32), dtype=jnp.bfloat16, _do_init=False)
    tx = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, tokens: jax.Array, rng: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model(tokens, params=params, dropout_rng=rng, train=True).logits[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        changes, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    key = jax.random.PRNGKey(0)
    params = jax.eval_shape(lambda: model.init_weights(key, model.input_shape))
    assert_every_rule(step, (params, jax.eval_shape(tx.init, params), jnp.ones((2, 32), jnp.int32), key))


def test_the_gradients_of_a_strided_convolution_cost_what_it_costs() -> None:
    def costs(size: int) -> list[float]:
        step, args = gradient(partial(conv, stride=2), *arrays((2, size, size, 4), (3, 3, 4, 8)))
        rules = [rule for _, view, rule, _ in cases(step, args) if rule and view.primitive == "conv_general_dilated"]
        return [rule.flops_per_point * math.prod(f.size for f in rule.factors) for rule in rules]

    assert len(set(costs(8))) == len(set(costs(9))) == 1


# ---- the rules against what the primitives compute ----------------------------------------------


def random_array(aval: Any, rng: np.random.Generator) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), aval.shape) if aval.shape else jax.random.key(0)
    if aval.dtype == bool:
        return rng.random(aval.shape) < 0.5
    if jnp.issubdtype(aval.dtype, jnp.integer):  # small, so that most are legal indices and shifts; never 0
        return rng.integers(1, 4, aval.shape).astype(aval.dtype)
    return rng.uniform(0.5, 1.5, aval.shape).astype(aval.dtype)


def half_of(
    shape: tuple[int, ...], dims: DimFactors, rule: Rule, factor: int, part: int, operand: int | None = None
) -> np.ndarray | None:
    """Where a tensor's elements are in a half of a factor, or in what a window reads for it; None if it does not have
    the factor."""
    for d, factors in enumerate(dims):
        if factor in factors:
            minor = math.prod(rule.factors[f].size for f in factors[factors.index(factor) + 1 :])
            size = rule.factors[factor].size
            here = ((np.arange(shape[d]) // minor) % size < size // 2) == (part == 0)
            for halo in rule.halos:
                if (halo.operand, halo.dim) == (operand, d):
                    window = halo.window.local(2)
                    assert window is not None
                    first = part * (shape[d] // 2 + window.step) + window.start - window.low - window.outside[0]
                    here = (np.arange(shape[d]) >= first) & (np.arange(shape[d]) < first + window.length)
            return np.broadcast_to(here.reshape([-1 if i == d else 1 for i in range(len(shape))]), shape)
    return None


#: What a reduction takes for parts that are elsewhere, and how it combines parts.
COMBINING: dict[str, tuple[Any, np.ufunc]] = {"sum": (0, np.add), "prod": (1, np.multiply)}
COMBINING |= {"max": (-np.inf, np.maximum), "min": (np.inf, np.minimum)}
COMBINING |= {"and": (True, np.logical_and), "or": (False, np.logical_or)}


def _cast(identity: Any, dtype: np.dtype) -> Any:
    """An identity in a dtype; of integers, the least or largest stands for an infinity."""
    if np.issubdtype(dtype, np.integer) and np.isinf(identity):
        return np.iinfo(dtype).max if identity > 0 else np.iinfo(dtype).min
    return np.asarray(identity).astype(dtype)


class Evaluated:
    """One equation with random operands."""

    def __init__(self, equation: Equation, view: NodeView, rule: Rule, avals: Sequence[Any]) -> None:
        rng = np.random.default_rng(0)
        self.equation, self.view, self.rule = equation, view, rule
        literals = [v.value if isinstance(v, LiteralOperand) else None for v in equation.operands]
        pairs = list(zip(avals, literals, strict=True))
        self.operands, self.others = (
            [lit if a is None else random_array(a, rng) for a, lit in pairs] for _ in range(2)
        )

    def results(self, operands: Sequence[Any]) -> list[np.ndarray]:
        values = jax_compat.bind(self.equation.source, list(map(jnp.asarray, operands)))
        return [np.asarray(value, np.float64) for value in values]

    def halves(self, factor: int, part: int) -> list[np.ndarray | None]:
        pairs = zip(self.view.operand_shapes, self.rule.operands, strict=True)
        return [half_of(shape, dims, self.rule, factor, part, i) for i, (shape, dims) in enumerate(pairs)]

    def check_pass_through(self, factor: int) -> None:
        before = self.results(self.operands)
        for part in (0, 1):
            tensors = zip(self.operands, self.others, self.halves(factor, part), strict=True)
            mixed = [x if half is None else np.where(half, x, y) for x, y, half in tensors]
            for old, new, dims in zip(before, self.results(mixed), self.rule.results, strict=True):
                half = half_of(old.shape, dims, self.rule, factor, part)
                keep = np.ones(old.shape, bool) if half is None else half
                np.testing.assert_allclose(new[keep], old[keep], rtol=1e-5, err_msg=str(self.equation.source))

    def check_reduction(self, factor: int, kind: str) -> None:
        identity, combine = COMBINING[kind]
        parts = []
        for part in (0, 1):
            masked = []
            for x, half in zip(map(np.asarray, self.operands), self.halves(factor, part), strict=True):
                # what lacks the factor is whole in both; only what a scatter adds to is counted once
                lacking = np.full(x.shape, part == 0 or not self.view.primitive.startswith("scatter"))
                here = lacking if half is None else half
                masked.append(np.where(here, x, _cast(identity, x.dtype)))
            parts.append(self.results(masked))
        for whole, *halves in zip(self.results(self.operands), *parts, strict=True):
            np.testing.assert_allclose(combine(*halves), whole, rtol=1e-5, err_msg=str(self.equation.source))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*SNIPPETS, "cnn_batchnorm", "gpt"])
def test_halves_along_a_factor_do_not_mix(name: str) -> None:
    function, args = named(name)
    seen: set[tuple[Any, ...]] = set()
    for equation, view, rule, avals in cases(function, args):
        assert rule is not None
        key = (view.primitive, str(view.params), rule.operands, rule.results)
        in_operands = {f for dims in rule.operands for dim in dims for f in dim}
        if key in seen or not in_operands or "random" in view.primitive:
            continue
        seen.add(key)
        evaluated = Evaluated(equation, view, rule, avals)
        windowed = {halo.factor for halo in rule.halos}  # other manual ones: tests/test_manual.py
        for factor in (in_operands - rule.manual) | windowed:
            if any(halo.factor == factor and halo.window.local(2) is None for halo in rule.halos):
                continue  # it does not divide by two
            kind = rule.factors[factor].reduction
            if kind is None:
                evaluated.check_pass_through(factor)
            else:
                evaluated.check_reduction(factor, kind)
