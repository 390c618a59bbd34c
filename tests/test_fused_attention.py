"""Fused attention (cuDNN, Pallas) is split over batch and heads, and every device runs the kernel on its part."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # noqa: TID251
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.interpreters import mlir  # noqa: TID251
from kernel_strategies import kernels, run_every_strategy
from on_absent_gpus import compiled as compiled_for_gpus

import autopar
from autopar.transforms.program import program_of
from autopar.xla_compiler import hlo_collectives as hlo

RNG = np.random.default_rng(0)
H100 = "h100-sxm"


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def with_gradients(attention: Callable[..., Any], num_args: int = 3) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        return jnp.sum(attention(*args).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=tuple(range(num_args)))


def cudnn_attention(**options: Any) -> Callable[..., Any]:
    return lambda *args: jax.nn.dot_product_attention(*args, implementation="cudnn", **options)


def planned(step: Callable[..., Any], args: Sequence[Any], mesh: str, **pin: Any) -> autopar.Plan:
    plan = autopar.plan(step, *args, mesh=mesh, hardware=H100, pin=pin)
    assert isinstance(plan, autopar.Plan)
    return plan


# -- cuDNN attention -----------------------------------------------------------------------------

Q, K, ONE_HEAD = array(8, 256, 16, 64), array(8, 256, 8, 64), array(8, 256, 1, 64)


def test_cudnn_attention_is_planned_without_cudnn() -> None:
    plan = planned(with_gradients(cudnn_attention(is_causal=True)), (Q, K, K), "8")
    assert plan.replicated == () and plan.notes == ()
    assert {region.operands[0].dims for region in plan.regions} == {(("data",), (), (), ())}
    if jax.default_backend() != "gpu":
        with pytest.raises(RuntimeError, match="cuDNN"):  # JAX's own check is in place again
            cudnn.check_cudnn_version()


@pytest.mark.parametrize(
    ("key", "bias", "forward", "backward"),
    [
        (K, None, "a=8 b=8 d=256", "a=8 b=8 d=256"),  # d: tokens, shared by context parallelism
        (Q, None, "a=8 b=16 c=256", "a=8 b=16 c=256"),
        (ONE_HEAD, None, "a=8 b=16 c=256", "a=8 b=16 c=256"),  # the gradient of the only head is a sum over query heads
        (K, array(8, 16, 256, 256), "a=8 b=8", "a=8 b=8"),
        (K, array(1, 16, 256, 256), "a=8 b=8", "a=8 b=8"),  # the gradient of the bias is a sum over the batch
        (K, array(8, 1, 256, 256, dtype=bool), "a=8 b=8", "a=8 b=8"),
    ],
)
def test_cudnn_attention_is_split_over_batch_and_heads(key: Any, bias: Any, forward: str, backward: str) -> None:
    if bias is None:
        step, args = with_gradients(cudnn_attention()), (Q, key, key)
    elif bias.dtype == bool:
        step = with_gradients(lambda q, k, v, mask: cudnn_attention(mask=mask)(q, k, v))
        args = (Q, key, key, bias)
    else:
        step, args = with_gradients(cudnn_attention(), 4), (Q, key, key, bias)
    first, second = kernels(step, args, "dot_product_attention")
    assert first.split("; ")[1] == forward and second.split("; ")[1] == backward


def test_the_operands_of_cudnn_attention_are_split_alike() -> None:
    lengths = jnp.full((8,), 200, jnp.int32)
    attention = cudnn_attention(query_seq_lengths=lengths, key_value_seq_lengths=lengths, local_window_size=(32, 0))
    forward, backward = kernels(with_gradients(attention), (Q, K, K), "dot_product_attention")
    assert forward == "a . bc ., a . b ., a . b ., ., a, a, ., ., ., . -> a . bc ., a bc .; a=8 b=8"
    gradients = "a . bc ., a . b ., a . b .; a=8 b=8"
    before = "a . bc ., a . b ., a . b ., ., a, a, ., ., ., ., a bc ., a . bc ., a . bc ."
    assert backward == f"{before} -> {gradients}"


@pytest.mark.parametrize("params", [{"dropout_rate": 0.1}, {"mask_type": "ALIBI"}, {"packed": True}])
def test_what_depends_on_the_place_of_a_score_is_not_split(params: dict[str, Any]) -> None:
    """Dropout numbers all scores, ALiBi all heads, packed segments the whole batch."""
    packed = params.pop("packed", False)
    offsets = array(8, 4, dtype=jnp.int32) if packed else array(0)
    given = {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": "NO_MASK",
        "layout": 0,
        "sliding_window_length": None,
        "is_training": True,
    } | params
    given["mask_type"] = cudnn.MaskType[given["mask_type"]]
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:
        given["score_mod"] = None
    operands = [Q, K, K, *[array(0)] * 3, offsets, offsets, *[array(0)] * 2]
    step = lambda *args: cudnn._dot_product_attention_fwd_p_wrapper.bind(*args, **given)  # noqa: E731
    (rule,) = kernels(step, operands, "dot_product_attention")
    assert rule.split("; ")[-1] == ("a=8" if packed else "none")  # packed: heads alone
    assert not packed or rule.startswith(". . ab ., . . a .")


# -- cuDNN attention on CPUs ---------------------------------------------------------------------


@pytest.fixture
def cudnn_on_cpu() -> None:
    """XLA's attention in the place of cuDNN's kernels, which exist on GPUs alone: the primitives below JAX's partitioning."""

    def attention(query: Any, key: Any, value: Any, bias: Any, lengths: Sequence[Any], params: dict[str, Any]) -> Any:
        has_bias, is_padded = params["variadic_args"][0], "PADDING" in params["mask_type"].name
        window = params["sliding_window_length"]
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias if has_bias else None,
            scale=params["scale"],
            is_causal="CAUSAL" in params["mask_type"].name,
            query_seq_lengths=lengths[0] if is_padded else None,
            key_value_seq_lengths=lengths[1] if is_padded else None,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="xla",
        )

    def forward(query: Any, key: Any, value: Any, bias: Any, *others: Any, **params: Any) -> Any:
        statistics = jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
        return [attention(query, key, value, bias, others[:2], params), statistics][: 1 + params["is_training"]]

    def backward(query: Any, key: Any, value: Any, bias: Any, *others: Any, **params: Any) -> Any:
        def of(*operands: Any) -> Any:
            query, key, value, bias = operands
            return attention(query, key, value, bias, others[:2], params)

        gradients = jax.vjp(of, query, key, value, bias)[1](others[-1])
        return gradients[: 4 if params["variadic_args"][1] else 3]

    for name, function in (("fwd", forward), ("bwd", backward)):
        primitive = getattr(cudnn, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu")


LENGTHS = {"query_seq_lengths": jnp.array([64, 50, 9, 64]), "key_value_seq_lengths": jnp.array([64, 40, 64, 8])}


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.parametrize(
    ("options", "num_heads", "bias"),
    [
        ({"is_causal": True}, (16, 4), None),
        ({"is_causal": True, "local_window_size": (16, 0)}, (16, 1), None),
        ({"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"]}, (4, 4), None),
        (LENGTHS, (8, 8), None),
        ({}, (16, 4), (1, 16, 64, 64)),
        ({"is_causal": True}, (16, 4), (4, 1, 64, 64)),
        ({}, (16, 4), (1, 1, 64, 64)),
    ],
)
@pytest.mark.parametrize("mesh", ["data=4,model=2", "data=2,model=4"])
def test_a_step_with_cudnn_attention_equals_the_unsharded_step(
    options: dict[str, Any], num_heads: tuple[int, int], bias: Any, mesh: str
) -> None:
    def step(implementation: str) -> Callable[..., Any]:
        def attention(*args: Any) -> Any:
            return jax.nn.dot_product_attention(*args, **options, implementation=implementation)  # type: ignore[arg-type]

        return with_gradients(attention, 3 if bias is None else 4)

    shapes = [(4, 64, n, 16) for n in (num_heads[0], num_heads[1], num_heads[1])] + ([] if bias is None else [bias])
    args = [normal(*shape).astype(jnp.bfloat16) for shape in shapes]
    plan = planned(step("cudnn"), args, mesh, arg0=jax.P("data", None, "model"))
    got = autopar.parallelize(step("cudnn"), plan=plan)(*args)
    expected = jax.jit(step("xla"))(*args)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0.05, atol=0.1)


# -- Pallas --------------------------------------------------------------------------------------

SIZES = gpu_attention.BlockSizes(32, 32, 32, 32, 32, 32)


def mha(q: Any, k: Any, v: Any, *, kind: str = "causal", interpret: bool = True) -> Any:
    """Pallas attention for GPUs."""
    segments = jnp.broadcast_to(jnp.arange(q.shape[1]) // 20, q.shape[:2]) if kind == "segments" else None
    return gpu_attention.mha(q, k, v, segments, causal=kind == "causal", interpret=interpret, block_sizes=SIZES)


def splash_attention(q: Any, k: Any, v: Any) -> Any:
    """Pallas attention for TPUs."""
    size = min(128, q.shape[2])
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((q.shape[2], q.shape[2])) for _ in range(q.shape[1])])
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    options: dict[str, Any] = {f"block_{name}": size for name in names}
    sizes = splash.BlockSizes(**options)
    make = splash.make_splash_mha_single_device if k.ndim == 4 else splash.make_splash_mqa_single_device
    return jax.vmap(make(mask, block_sizes=sizes, interpret=True))(q, k, v)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("causal", "a . b ., a . b ., a . b . -> a . b ., a b .; a=4 b=8"),
        ("segments", "a . b ., a . b ., a . b ., a . -> a . b ., a b .; a=4 b=8"),
        ("whole", "b ad c ., b . c ., b . c . -> b ad c ., b c ad; a=2 b=4 c=8"),  # queries too, in blocks
    ],
)
def test_pallas_attention_runs_by_every_strategy(kind: str, rule: str) -> None:
    step, args = with_gradients(partial(mha, kind=kind)), [normal(4, 64, 8, 16) for _ in range(3)]
    forward, before, backward = kernels(step, args, "pallas_call")
    assert forward == rule
    assert before == "b ad c ., b ad c . -> b c ad; a=2 b=4 c=8"
    assert backward.endswith("; a=4 b=8")
    assert run_every_strategy(step, args, "2x4", most=3) == 9


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_heads", [4, 0])
def test_splash_attention_runs_by_every_strategy(num_heads: int) -> None:
    """Grouped heads are split with their groups. JAX 0.10 keeps scratch memory in results, which no device can share."""
    keys = (2, num_heads, 256, 128) if num_heads else (2, 256, 128)
    step, args = with_gradients(splash_attention), (normal(2, 8, 256, 128), normal(*keys), normal(*keys))
    rules = kernels(step, args, "pallas_call")
    assert len(rules) == 3 and "none" not in rules
    if jax.__version_info__ >= (0, 12):
        assert [rule.split("; ")[1] for rule in rules] == [
            "a=2 b=4" if num_heads else "a=2 b=8",
            "a=2 b=4" if num_heads else "a=2",
            "a=2 b=4" if num_heads else "a=2 b=8",
        ]
    assert run_every_strategy(step, args, "2x4", most=2) >= 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "num_microbatches"), [("data=8", 1), ("data=2,model=4", 1), ("data=4,model=2", 2), ("data=8", 2)]
)
def test_a_step_with_pallas_attention_equals_the_unsharded_step(mesh: str, num_microbatches: int) -> None:
    """Also with gradient accumulation: the kernel runs on a microbatch."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights[:3])
            return jnp.mean(jnp.einsum("btnh,nhd->btd", mha(q, k, v), weights[3]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    args = [normal(32, 8, 16) for _ in range(3)] + [normal(8, 16, 32)], normal(16, 64, 32)
    pin = {"x": jax.P("data")}
    plan = autopar.plan(step, *args, mesh=mesh, hardware=H100, pin=pin, num_microbatches=num_microbatches)
    assert isinstance(plan, autopar.Plan)
    assert len(plan.regions) == 3 and plan.replicated == ()
    got, expected = autopar.parallelize(step, plan=plan)(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


# -- compiled for GPUs that are not here ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_one_absent_gpu_runs_cudnn_attention(absent_gpus: Any) -> None:
    """JAX cannot lower cuDNN's attention outside a manual region without devices."""
    step, args = with_gradients(cudnn_attention(is_causal=True)), (Q, K, K)
    plan = planned(step, args, "data=1")
    program = program_of(step, args, carry=None, donate=None)
    text = compiled_for_gpus(absent_gpus, plan, program, *args).hlo_text
    assert text.count("__cudnn$fmhaSoftmax") >= 2


@pytest.mark.parametrize("kind", ["cudnn", "pallas"])
def test_each_of_eight_gpus_runs_an_eighth(kind: str, absent_gpus: Any) -> None:
    """XLA compiles the kernels for absent H100s on local shapes, between no collectives."""
    attention = cudnn_attention(is_causal=True) if kind == "cudnn" else partial(mha, interpret=False)
    step, key = with_gradients(attention), array(8, 256, 8 if kind == "cudnn" else 16, 64)
    args = (array(8, 256, 16, 64), key, key)
    plan = planned(step, args, "data=2,model=4", arg0=jax.P("data", None, "model"))
    program = program_of(step, args, carry=None, donate=None)
    text = compiled_for_gpus(absent_gpus, plan, program, *args).hlo_text
    target = "__cudnn$fmhaSoftmax" if kind == "cudnn" else "__gpu$xla.gpu.triton"
    calls = [line for line in text.splitlines() if f'custom_call_target="{target}' in line]
    assert len(calls) == (2 if kind == "cudnn" else 3)
    assert all("[4,256,4,64]" in line or "[4,4,256" in line for line in calls)
    assert "[8,256" not in text and not re.search(r" (all-|reduce-scatter|collective-)", text)


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "key"), [(None, ONE_HEAD), (array(1, 16, 256, 256), K), (array(1, 1, 256, 256), K)])
def test_what_devices_share_has_one_reduction(bias: Any, key: Any, absent_gpus: Any) -> None:
    step, args = with_gradients(cudnn_attention(), 3 if bias is None else 4), [Q, key, key]
    pin = {"arg0": jax.P("data", None, "model")}
    if bias is not None:
        args.append(bias)
        pin["arg3"] = jax.P(None, "model" if bias.shape[1] > 1 else None)
    plan = planned(step, args, "data=2,model=4", **pin)
    program = program_of(step, tuple(args), carry=None, donate=None)
    text = compiled_for_gpus(absent_gpus, plan, program, *args).hlo_text
    found = list(hlo.collectives(text))
    assert {one.kind for one in found} == {one.kind for one in plan.collectives} == {"all-reduce"}
    assert sum(2 * one.num_elements for one in found if one.kind == "all-reduce") == sum(
        one.num_bytes for one in plan.collectives if one.kind == "all-reduce"
    )
