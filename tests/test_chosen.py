"""Expert, sequence and context parallelism: chosen without a request where they are the optimum.

Each program is planned under a slow GPU on 8 devices, so that it can run here and be compared with one device; and at a
realistic size under an H100, where XLA's GPU program must send what the plan predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.plans.plan import Plan
from autopar.xla_compiler.compiler import Compiler

PROFILE = str(Path(__file__).parent / "profiles" / "slow_gpu.toml")
Params = dict[str, Any]
WHOLE: tuple[str, ...] = ()
SPLIT = ("data",)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def train_step(model: Callable[[Params, jax.Array], jax.Array]) -> Callable[..., Any]:
    def step(params: Params, x: jax.Array, target: jax.Array) -> Any:
        def loss(params: Params) -> jax.Array:
            return jnp.mean(jnp.square((model(params, x) - target).astype(jnp.float32)))

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, gradient), value

    return step


# -- models ----------------------------------------------------------------------------------


def dense_experts(p: Params, x: jax.Array) -> jax.Array:
    """Each token goes to one expert, by masks of as many places as an expert has for a group (GShard)."""
    num_experts = p["up"].shape[0]
    weights = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, p["gate"]))
    choice = jax.nn.one_hot(jnp.argmax(weights, -1), num_experts, dtype=x.dtype)
    place = jnp.cumsum(choice.astype(jnp.float32), 1) * choice - 1
    mask = jax.nn.one_hot(place.astype(jnp.int32), 2 * x.shape[1] // num_experts, dtype=x.dtype)
    sent = jnp.einsum("gsec,gsm->egcm", mask, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emf->egcf", sent, p["up"]))
    back = jnp.einsum("egcf,efm->egcm", hidden, p["down"])
    return x + jnp.einsum("gsec,egcm->gsm", mask * (weights * choice)[..., None], back)


def ragged_experts(p: Params, x: jax.Array) -> jax.Array:
    """The same without places: tokens sorted by expert, and products in groups of unequal size."""
    logits = x @ p["gate"]
    expert = jnp.argmax(logits, -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=p["up"].shape[0]).astype(jnp.int32)
    hidden = jax.nn.relu(lax.ragged_dot(x[order], p["up"], sizes))
    back = jnp.zeros_like(x).at[order].set(lax.ragged_dot(hidden, p["down"], sizes))
    return x + back * jnp.max(jax.nn.softmax(logits), -1, keepdims=True)


def experts(lead: tuple[int, ...], width: int, hidden: int, num: int, dtype: Any = jnp.float32) -> Sequence[Any]:
    x = array(*lead, width, dtype=dtype)
    up, down = array(num, width, hidden, dtype=dtype), array(num, hidden, width, dtype=dtype)
    return {"gate": array(width, num, dtype=dtype), "up": up, "down": down}, x, x


def normed(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6)


def transformer_layer(p: Params, x: jax.Array) -> jax.Array:
    entered = normed(x)
    q, k, v = (jnp.einsum("bsd,dhe->bshe", entered, p[name]) for name in "qkv")
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(x.dtype)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    x = x + jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v), p["out"])
    return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]


def layer(length: int, width: int, heads: int, dtype: Any = jnp.float32) -> Sequence[Any]:
    """A batch of one."""
    size = width // heads
    p = {name: array(width, heads, size, dtype=dtype) for name in "qkv"}
    p |= {"out": array(heads, size, width, dtype=dtype)}
    p |= {"up": array(width, 4 * width, dtype=dtype), "down": array(4 * width, width, dtype=dtype)}
    x = array(1, length, width, dtype=dtype)
    return p, x, x


def decode(cache: Params, q: jax.Array, new: jax.Array, position: jax.Array) -> Any:
    """One token after a long context: its key and value enter the cache, and all of it is attended to."""
    k, v = (lax.dynamic_update_slice(cache[name], new, (0, position, 0, 0)) for name in "kv")
    scores = jnp.where(jnp.arange(k.shape[1]) <= position, jnp.einsum("bhe,bshe->bhs", q, k), -1e9)
    return {"k": k, "v": v}, jnp.einsum("bhs,bshe->bhe", jax.nn.softmax(scores), v)


def token(length: int, heads: int, size: int, dtype: Any = jnp.float32) -> Sequence[Any]:
    cache, one = array(1, length, heads, size, dtype=dtype), array(1, heads, size, dtype=dtype)
    return {"k": cache, "v": cache}, one, array(1, 1, heads, size, dtype=dtype), array(dtype=jnp.int32)


STEPS: dict[str, tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]] = {
    "dense_experts": (
        train_step(dense_experts),
        experts((8, 64), 64, 256, 8),
        experts((8, 1024), 1024, 4096, 8, jnp.bfloat16),
    ),
    "ragged_experts": (
        train_step(ragged_experts),
        experts((512,), 64, 32, 32),
        experts((8192,), 1024, 512, 64, jnp.bfloat16),
    ),
    "context": (train_step(transformer_layer), layer(512, 48, 6), layer(8192, 384, 6, jnp.bfloat16)),
    "heads": (train_step(transformer_layer), layer(512, 64, 8), layer(8192, 1024, 16, jnp.bfloat16)),
    "sequence": (train_step(transformer_layer), layer(64, 256, 8), layer(2048, 8192, 64, jnp.bfloat16)),
    "decode": (decode, token(4096, 3, 8), token(2**18, 3, 128, jnp.bfloat16)),
}


def planned(name: str) -> Plan:
    step, args, _ = STEPS[name]
    return autopar.plan(step, *args, mesh="8", hardware=PROFILE)


def dims_of(plan: Plan) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {tensor.path: tensor.sharding.dims for tensor in plan.inputs}


def sent(plan: Plan, least_bytes: float = 1024) -> Counter[str]:
    return Counter(use.kind for use in plan.collectives if use.num_bytes > least_bytes)


# -- what is chosen --------------------------------------------------------------------------


def test_experts_by_masks_are_split_and_tokens_change_places() -> None:
    plan = planned("dense_experts")
    dims = dims_of(plan)
    assert dims["params/up"] == dims["params/down"] == (SPLIT, WHOLE, WHOLE)
    assert dims["x"] == dims["target"] == (SPLIT, WHOLE, WHOLE)
    assert plan.strategy == "expert parallel over `data`"
    large = [use.kind for use in plan.collectives if use.num_bytes > 4096]
    assert large == ["all-to-all"] * 3  # there, back, and the gradients there: none of `x` is asked for


def test_experts_of_unequal_size_are_split() -> None:
    plan = planned("ragged_experts")
    dims = dims_of(plan)
    assert dims["params/up"] == dims["params/down"] == (SPLIT, WHOLE, WHOLE)
    assert plan.strategy == "expert parallel over `data`" and len(plan.regions) == 5
    pending = [region.results[0].unreduced == SPLIT for region in plan.regions]
    by_expert = [region.results[0].dims == (SPLIT, WHOLE, WHOLE) for region in plan.regions]
    assert (sum(pending), sum(by_expert)) == (3, 2)  # rows: forward twice, backward once; matrices: their gradients


def test_a_long_sequence_is_split_where_heads_are_not_divided() -> None:
    """Queries stay where they are, and all keys and values are gathered: context parallelism."""
    plan = planned("context")
    dims = dims_of(plan)
    assert all(dims[f"params/{name}"] == (WHOLE,) * len(dims[f"params/{name}"]) for name in "qkv")
    assert dims["x"] == dims["target"] == (WHOLE, SPLIT, WHOLE)
    scores = [d for d in plan.decisions if d.shape == (1, 6, 512, 512)]
    assert scores and all(d.sharding.dims == (WHOLE, WHOLE, SPLIT, WHOLE) for d in scores if d.phase == "forward")
    assert not sent(plan)["all-to-all"]


def test_a_long_sequence_goes_over_to_heads_for_attention() -> None:
    """Outside attention the sequence is split, inside it the heads: the all-to-alls of DeepSpeed-Ulysses."""
    plan = planned("heads")
    dims = dims_of(plan)
    assert dims["params/q"] == dims["params/k"] == dims["params/v"] == (WHOLE, SPLIT, WHOLE)
    assert dims["params/up"] == dims["params/down"] == (WHOLE, WHOLE)
    assert dims["x"] == (WHOLE, SPLIT, WHOLE)
    scores = [d for d in plan.decisions if d.shape == (1, 8, 512, 512)]
    assert scores and all(d.sharding.dims == (WHOLE, SPLIT, WHOLE, WHOLE) for d in scores)
    assert sent(plan)["all-to-all"] == 2


def test_wide_layers_are_split_and_the_sequence_between_them() -> None:
    """Tensor parallelism with each all-reduce as a reduce-scatter and an all-gather: Megatron's sequence parallelism."""
    plan = planned("sequence")
    dims = dims_of(plan)
    assert dims["params/q"] == (WHOLE, SPLIT, WHOLE) and dims["params/out"] == (SPLIT, WHOLE, WHOLE)
    assert dims["params/up"] == (WHOLE, SPLIT) and dims["params/down"] == (SPLIT, WHOLE)
    assert dims["x"] == dims["target"] == (WHOLE, SPLIT, WHOLE)
    assert sent(plan) == {"all-gather": 4, "reduce-scatter": 3}


def test_the_cache_of_a_long_context_is_split_by_position() -> None:
    plan = planned("decode")
    dims = dims_of(plan)
    assert dims["cache/k"] == dims["cache/v"] == (WHOLE, SPLIT, WHOLE, WHOLE)
    assert len(plan.regions) == 2 and plan.collectives
    assert all(use.kind == "all-reduce" and use.num_bytes < 1024 for use in plan.collectives)


# -- what runs -------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
def test_what_is_chosen_equals_one_device(name: str) -> None:
    step, args, _ = STEPS[name]
    rng = np.random.default_rng(0)
    values = [
        jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype) * 0.3, arg)
        if jnp.issubdtype(jax.tree.leaves(arg)[0].dtype, jnp.floating)
        else np.int32(2049)
        for arg in args
    ]
    expected = jax.tree.map(np.asarray, jax.jit(step)(*values))
    got = autopar.parallelize(step, plan=planned(name))(*values)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense_experts", "ragged_experts", "heads", "decode"])
def test_xla_s_gpu_program_sends_what_is_predicted(name: str, absent_gpus: Compiler) -> None:
    step, _, args = STEPS[name]
    told = autopar.verify(step, *args, mesh="8", hardware="h100-sxm", compiler=absent_gpus)
    assert all(match.figure.holds for match in told.collectives), str(told)
    assert not told.unpredicted, str(told)
