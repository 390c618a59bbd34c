"""Attention with its sequence sharded: equal to attention on one device, with communication and work by formula."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # noqa: TID251
from jax.interpreters import mlir  # noqa: TID251
from jax.sharding import AxisType

from autopar.cost import context_parallel as cost
from autopar.cost.context_parallel import AttentionShape
from autopar.errors import AttentionError
from autopar.hardware.profile import load
from autopar.ir.mesh import parse_mesh
from autopar.jax_interop.absent_cudnn import attention_without_devices, without_cudnn
from autopar.jax_interop.compilation import module_bytes
from autopar.runtime.context_parallel import blockwise, methods, primitive, ring
from autopar.runtime.context_parallel.kernels import BLOCKWISE, CUDNN, Kernel
from autopar.runtime.jit import abstract_mesh
from autopar.xla_compiler import hlo_collectives as hlo
from autopar.xla_compiler.hlo_text import Module, parse_module

RNG = np.random.default_rng(0)
SCALE = 0.3
METHODS = list(methods.METHODS)


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def operands(
    tokens: int, heads: int = 8, key_heads: int = 2, dim: int = 8, dtype: Any = jnp.float32
) -> list[jax.Array]:
    """Query, key, value, and the gradient of the output."""
    return [normal(2, tokens, n, dim, dtype=dtype) for n in (heads, key_heads, key_heads, heads)]


def sharded(
    method: str,
    sizes: dict[str, int],
    kernel: Kernel = BLOCKWISE,
    *,
    is_causal: bool,
    mesh: Any = None,
    packed: bool = False,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward pass on whole arrays, with the tokens sharded over all axes of a mesh."""
    axes = tuple(sizes)
    if mesh is None:
        devices = jax.devices()[: math.prod(sizes.values())]
        mesh = jax.make_mesh(tuple(sizes.values()), axes, devices=devices, axis_types=(AxisType.Auto,) * len(axes))
    options: dict[str, Any] = {"axes": axes, "scale": SCALE, "is_causal": is_causal}
    tokens, lse = jax.P(None, axes), jax.P(None, None, axes)

    def forward(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return methods.forward(method, kernel, q, k, v, segments=ids or None, **options)

    def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, *ids: Any) -> Any:
        return methods.backward(method, kernel, q, k, v, out, lse, d_out, segments=ids or None, **options)

    ids = (tokens, tokens) if packed else ()
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    return (
        shard(forward, in_specs=(tokens,) * 3 + ids, out_specs=(tokens, lse)),
        shard(backward, in_specs=(*(tokens,) * 4, lse, tokens, *ids), out_specs=(tokens,) * 3),
    )


def both(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    def run(q: Any, k: Any, v: Any, d_out: Any, *ids: Any) -> Any:
        out, lse = forward(q, k, v, *ids)
        return out, *backward(q, k, v, out, lse, d_out, *ids)

    return jax.jit(run)


def plain(q: Any, k: Any, v: Any, d_out: Any, *, is_causal: bool, mask: Any = None) -> Any:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, scale=SCALE, is_causal=is_causal, mask=mask)

    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(d_out)


def assert_close(got: Any, expected: Any, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol, rtol=rtol)


# -- equal to attention on one device ------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("sizes", [{"s": 2}, {"s": 4}, {"s": 8}, {"a": 2, "b": 2}, {"a": 2, "b": 4}])
def test_sharded_attention_equals_plain_attention(
    sizes: dict[str, int], heads: tuple[int, int], is_causal: bool, method: str
) -> None:
    args = operands(64, *heads)
    assert_close(both(*sharded(method, sizes, is_causal=is_causal))(*args), plain(*args, is_causal=is_causal))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_batch_and_heads_are_sharded_too(method: str) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "s", "model"), axis_types=(AxisType.Auto,) * 3)
    args, spec = operands(16), jax.P("data", "s", "model")
    options: dict[str, Any] = {"axes": ("s",), "scale": SCALE, "is_causal": True}

    def local(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, lse = methods.forward(method, BLOCKWISE, q, k, v, **options)
        return out, *methods.backward(method, BLOCKWISE, q, k, v, out, lse, d_out, **options)

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False))(*args)
    assert_close(got, plain(*args, is_causal=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_devices", "is_causal"), [(1, True), (3, False), (3, True), (7, True)])
def test_any_number_of_devices(num_devices: int, is_causal: bool) -> None:
    args = operands(num_devices * 4, heads=2)
    assert_close(
        both(*sharded("ring", {"s": num_devices}, is_causal=is_causal))(*args), plain(*args, is_causal=is_causal)
    )


@pytest.mark.parametrize("num_devices", [pytest.param(3, marks=pytest.mark.slow), 4, 8])
def test_a_large_ring_is_a_loop(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MOST_UNROLLED", 2)
    args = operands(64 if num_devices > 3 else 48)
    run = both(*sharded("ring", {"s": num_devices}, is_causal=True))
    assert_close(run(*args), plain(*args, is_causal=True))
    if num_devices == 8:
        assert "while" in run.lower(*args).as_text()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_sequences(method: str, is_causal: bool) -> None:
    """A query sees its own segment, which may be on several devices, or start inside one."""
    args = operands(32, heads=4)
    ids = jnp.stack([jnp.searchsorted(jnp.array(ends), jnp.arange(32), side="right") for ends in ([5, 19], [16, 24])])
    ids = ids.astype(jnp.int32)
    mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    run = both(*sharded(method, {"s": 4}, is_causal=is_causal, packed=True))
    assert_close(run(*args, ids, ids), plain(*args, is_causal=is_causal, mask=mask))


@pytest.mark.parametrize("method", METHODS)
def test_a_query_without_a_key_has_no_output(method: str) -> None:
    query, *others = operands(16, heads=4)
    ids = jnp.zeros((2, 16), jnp.int32)
    forward, backward = sharded(method, {"s": 4}, is_causal=False, packed=True)
    out, d_query, d_key, d_value = both(forward, backward)(query, *others, ids.at[0, 3].set(1), ids)
    assert not out[0, 3].any() and not d_query[0, 3].any()
    assert all(jnp.isfinite(x).all() for x in (out, d_query, d_key, d_value))


@pytest.mark.parametrize("method", METHODS)
def test_cross_attention(method: str) -> None:
    """More keys than queries, and values of another size."""
    query, key = normal(2, 16, 4, 8), normal(2, 32, 4, 8)
    value, d_out = normal(2, 32, 4, 16), normal(2, 16, 4, 16)
    got = both(*sharded(method, {"s": 4}, is_causal=False))(query, key, value, d_out)

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(SCALE * jnp.einsum("btnh,bsnh->bnts", q, k)), v)

    out, vjp = jax.vjp(attention, query, key, value)
    assert_close(got, (out, *vjp(d_out)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16(method: str) -> None:
    """Within 2 % of the largest element of the float32 result: each device rounds a few times to 8 bits."""
    args = operands(64, dtype=jnp.bfloat16)
    got = both(*sharded(method, {"s": 4}, is_causal=True))(*args)
    expected = plain(*(x.astype(jnp.float32) for x in args), is_causal=True)
    assert {x.dtype.name for x in got} == {"bfloat16"}
    for a, b in zip(got, expected, strict=True):
        assert jnp.max(jnp.abs(a - b)) < 0.02 * jnp.max(jnp.abs(b))


def test_the_blockwise_kernel_pads_its_last_block() -> None:
    q, k, v, d_out = operands(24)
    forward, backward = (
        partial(f, scale=SCALE, is_causal=True, block=10) for f in (blockwise.forward, blockwise.backward)
    )
    assert_close(both(forward, backward)(q, k, v, d_out), plain(q, k, v, d_out, is_causal=True))


# -- communication and work ----------------------------------------------------------------------


def times(module: Module) -> dict[str, int]:
    """The executions of each computation; a loop's are known."""
    found = {module.entry: 1}
    for computation in reversed(module.computations.values()):
        for one in computation.instructions:
            here = found.get(computation.name, 1)
            if one.opcode == "while":
                assert one.trip_count is not None
                here *= one.trip_count
            found |= dict.fromkeys(one.callees, here)
    return found


def dot_flops(text: str) -> float:
    """FLOPs of the matmuls of a compiled program on each device: it has no branch that only some devices take."""
    module = parse_module(text)
    total, num_times = 0.0, times(module)
    for computation in module.computations.values():
        for one in computation.instructions:
            assert one.opcode != "conditional"
            if one.opcode == "dot":
                contracted = computation.shape_of(one.operands[0]).dims
                size = math.prod(contracted[d] for d in one.numbers("lhs_contracting_dims"))
                total += 2.0 * num_times[computation.name] * one.shape.num_elements * size
    return total


def shape_of(args: list[Any]) -> AttentionShape:
    (batch, tokens, heads, dim), key_heads = args[0].shape, args[1].shape[2]
    return AttentionShape(batch, tokens, tokens, heads, key_heads, dim, dim, args[0].dtype.itemsize)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_work_and_communication_by_formula(method: str, is_causal: bool) -> None:
    n, args = 4, operands(64, heads=4)
    shape = shape_of(args)
    forward, backward = sharded(method, {"s": n}, is_causal=is_causal)
    q, k, v, d_out = args
    for function, given in ((forward, (q, k, v)), (backward, (q, k, v, *jax.eval_shape(forward, q, k, v), d_out))):
        is_backward = function is backward
        text = jax.jit(function).lower(*given).compile().as_text()
        assert text is not None
        calls = cost.kernel_calls(method, shape, n, is_causal=is_causal)
        # The blockwise kernel computes hidden pairs too, in each device's own block.
        whole = [cost.KernelCall(one.shape, False, one.num_times) for one in calls]
        assert dot_flops(text) == sum(one.flops(is_backward=is_backward) for one in whole)
        found: dict[str, float] = defaultdict(float)
        for one in hlo.collectives(text, ignore_up_to=0):
            found[one.kind] += one.num_times * hlo.sent_bytes(one.kind, sum(one.payloads(n)), n)
        assert found == cost.sent_bytes(method, shape, n, is_causal=is_causal, is_backward=is_backward)


@pytest.mark.parametrize("num_devices", [2, 3, 8, 64])
def test_zigzag_leaves_each_device_the_same_work(num_devices: int) -> None:
    """Each computes exactly its share of the pairs that the mask leaves; contiguous parts would have up to twice that."""
    shape = AttentionShape(2, 128 * num_devices, 128 * num_devices, 8, 2, 64, 64, 2)
    whole = cost.KernelCall(shape, True)
    for method in METHODS:
        if cost.refusal(method, shape, num_devices, is_causal=True) is None:
            calls = cost.kernel_calls(method, shape, num_devices, is_causal=True)
            for is_backward in (False, True):
                own = sum(one.flops(is_backward=is_backward) for one in calls)
                assert own * num_devices == whole.flops(is_backward=is_backward)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 5, 8, 64])
def test_zigzag_moves_are_permutations(num_devices: int) -> None:
    for moves in cost.zigzag_moves(num_devices):
        assert [sorted(side) for side in zip(*moves, strict=True)] == [list(range(num_devices))] * 2
    held = [set[int]() for _ in range(num_devices)]
    for parity, moves in enumerate(cost.zigzag_moves(num_devices)):
        for source, target in moves:
            held[target].add(2 * source + parity)
    assert held == [{device, 2 * num_devices - 1 - device} for device in range(num_devices)]


def test_bytes_of_a_ring() -> None:
    """LLaMA-3 8B at 32k tokens on 8 devices: 7 moves of 16.8 MB of keys and values in the forward pass."""
    shape = AttentionShape(1, 32768, 32768, 32, 8, 128, 128, 2)
    keys = 2 * 4096 * 8 * 128 * 2
    sent = partial(cost.sent_bytes, "ring", shape, 8)
    assert sent(is_causal=False, is_backward=False) == {"collective-permute": 7 * keys}
    assert sent(is_causal=False, is_backward=True) == {"collective-permute": 14 * keys}
    queries, lse = 4096 * 32 * 128 * 2, 4096 * 32 * 4
    assert sent(is_causal=True, is_backward=False) == {"collective-permute": 8 * keys + 2 * queries + lse}
    assert sent(is_causal=True, is_backward=True) == {"collective-permute": 16 * keys + 4 * queries + lse}
    hidden = [one for one in cost.collectives("ring", shape, 8, is_causal=True, is_backward=True) if one.is_hidden]
    assert sum(one.num_times * one.num_bytes for one in hidden) == 13 * keys


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "tokens", "heads", "message"),
    [
        (
            "ring",
            (24, 24),
            (4, 2),
            "24 tokens cannot be split into 16 chunks, two per device, .* multiple of 16 tokens",
        ),
        ("gathered", (24, 24), (4, 2), "24 tokens cannot be split into 16 chunks"),
        ("ring", (16, 32), (4, 2), "a causal mask needs as many queries as keys, not 16 and 32"),
        ("ulysses", (16, 16), (4, 2), "4 query heads cannot be split over 8 devices: use the method 'ring'"),
        ("ring", (16, 16), (4, 3), "4 query heads are no multiple of 3 key heads"),
        ("spiral", (16, 16), (4, 2), "the methods .* are ring, ulysses, gathered, not 'spiral'"),
    ],
)
def test_shapes_that_cannot_be_sharded_are_refused(
    method: str, tokens: tuple[int, int], heads: tuple[int, int], message: str
) -> None:
    query, key = normal(1, tokens[0], heads[0], 8), normal(1, tokens[1], heads[1], 8)
    with pytest.raises(AttentionError, match=message):
        sharded(method, {"s": 8}, is_causal=True)[0](query, key, key)


def test_tokens_must_divide_by_the_devices() -> None:
    shape = AttentionShape(1, 20, 20, 4, 4, 8, 8, 4)
    reason = cost.refusal("ulysses", shape, 8, is_causal=False)
    assert reason == "20 queries cannot be split over 8 devices: use a multiple of 8 tokens"


def test_cudnn_takes_no_segment_ids() -> None:
    ids = jnp.zeros((2, 32), jnp.int32)
    with pytest.raises(AttentionError, match=r"the cuDNN kernel takes no segment ids: .* the blockwise kernel"):
        jax.eval_shape(sharded("ring", {"s": 4}, CUDNN, is_causal=True, packed=True)[0], *operands(32)[:3], ids, ids)


# -- cuDNN ---------------------------------------------------------------------------------------


@pytest.fixture
def blockwise_as_cudnn() -> None:
    """The blockwise kernel in the place of cuDNN's on CPUs, with its log-sum-exp."""

    def options(params: Any) -> dict[str, Any]:
        return {"scale": params["scale"], "is_causal": params["mask_type"] is cudnn.MaskType.CAUSAL}

    def turned(layout: int, *arrays: Any) -> Any:
        return [jnp.swapaxes(x, 1, 2) if layout else x for x in arrays]

    def forward(*args: Any, **params: Any) -> Any:
        out, lse = blockwise.forward(*turned(params["layout"], *args[:3]), **options(params))
        return [*turned(params["layout"], out), lse][: 1 + params["is_training"]]

    def backward(*args: Any, **params: Any) -> Any:
        q, k, v, out, d_out = turned(params["layout"], *args[:3], args[11], args[12])
        gradients = blockwise.backward(q, k, v, out, args[10], d_out, **options(params))
        return turned(params["layout"], *gradients)

    for name, function in (("fwd", forward), ("bwd", backward)):
        one = getattr(cudnn, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(one, mlir.lower_fun(function, multiple_results=True), platform="cpu")


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("blockwise_as_cudnn")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["BTNH", pytest.param("BNTH", marks=pytest.mark.slow)])
def test_the_equations_of_a_step_with_cudnn_attention(method: str, layout: str) -> None:
    """Both equations of a traced step, on local tokens."""
    args = operands(32, heads=4, dtype=jnp.bfloat16)
    expected = plain(*args, is_causal=True)
    dim = 1 if layout == "BTNH" else 2
    if dim == 2:
        args = [jnp.swapaxes(x, 1, 2) for x in args]

    def step(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        attention = partial(
            cudnn.dot_product_attention, scale=SCALE, mask_type=cudnn.MaskType.CAUSAL, qkv_layout=layout
        )
        out, vjp = jax.vjp(attention, q, k, v)
        return out, *vjp(d_out)

    with without_cudnn():
        text = jax.make_jaxpr(step)(*args)
    forward, backward = (
        one for one in equations_of(text) if one.primitive.name.endswith(("fwd_wrapper", "bwd_wrapper"))
    )
    tokens = jax.P(*(None,) * dim, "s")
    mesh = jax.make_mesh((4,), ("s",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))

    def local(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        unused = [jnp.zeros(0, q.dtype)] * 7
        run = partial(primitive.run, method=method, axes=("s",), kernel=CUDNN)
        out, lse = run(forward.params, [q, k, v, *unused])
        return out, *run(backward.params, [q, k, v, *unused, lse, out, d_out])

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 4, out_specs=tokens, check_vma=False))(*args)
    got = got if dim == 1 else [jnp.swapaxes(x, 1, 2) for x in got]
    assert_close(got, expected, atol=0.05, rtol=0.05)


def equations_of(closed: Any) -> list[Any]:
    from autopar.jax_interop import compat

    found: list[Any] = []
    for equation in compat.open_jaxpr(closed)[0].eqns:
        found.append(equation)
        for inner in compat.programs_in(equation):
            found += equations_of(inner)
    return found


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"variadic_args": (True, True)}, "a bias"),
        ({"dropout_rate": 0.1}, "dropout"),
        ({"sliding_window_length": 8}, "a sliding window"),
        ({"mask_type": cudnn.MaskType.ALIBI}, "the mask ALIBI"),
        ({"lengths": (2,)}, "sequence lengths or pages"),
    ],
)
def test_what_the_methods_do_not_compute_is_refused(changed: dict[str, Any], reason: str) -> None:
    lengths = changed.pop("lengths", (0,))
    plain = {"variadic_args": (False, False), "dropout_rate": 0.0, "sliding_window_length": None, "layout": 0}
    params = plain | {"mask_type": cudnn.MaskType.NO_MASK, "scale": SCALE, "is_training": True} | changed
    args = [*operands(8)[:3], jnp.zeros(0), jnp.zeros(lengths), *[jnp.zeros(0)] * 5]
    with pytest.raises(AttentionError, match=f"attention with {reason} cannot run .*: shard its batch or heads"):
        primitive.run(params, args, method="ring", axes=("s",), kernel=CUDNN)


# -- compiled for GPUs that are not here ---------------------------------------------------------


def compiled_for_gpus(
    compiler: Any, method: str, num_devices: int, tokens: int, *, is_causal: bool
) -> tuple[AttentionShape, list[Module]]:
    """The forward and the backward pass, compiled for absent H100s."""
    profile, sizes = load("h100-sxm"), {"s": num_devices}
    mesh = abstract_mesh(parse_mesh(f"s={num_devices}"), profile)
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.bfloat16) for heads in (16, 8))
    lse = jax.ShapeDtypeStruct((1, 16, tokens), jnp.float32)
    forward, backward = sharded(method, sizes, CUDNN, is_causal=is_causal, mesh=mesh)
    modules = []
    for function, args in ((forward, (q, k, k)), (backward, (q, k, k, q, lse, q))):
        with attention_without_devices():
            lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
        step = compiler.compile(module_bytes(lowered), profile, num_devices, -(-num_devices // 8))
        modules.append(parse_module(step.hlo_text))
    return shape_of([q, k]), modules


def overlapped(module: Module) -> Counter[bool]:
    """The number of collective-permutes of a scheduled program with and without an attention kernel from start to done."""
    assert module.is_scheduled
    found, num_times = Counter[bool](), times(module)
    wrapped = {
        one.callees[0]
        for each in module.computations.values()
        for one in each.instructions
        if one.opcode == "async-start"
    }
    for computation in module.computations.values():
        if computation.name in wrapped:
            continue
        starts: dict[str, bool] = {}
        for one in computation.instructions:
            if one.opcode in ("collective-permute-start", "async-start") and "permute" in one.name:
                starts[one.name] = False
            elif "fmha" in one.custom_call_target:
                starts = dict.fromkeys(starts, True)
            elif one.opcode.endswith("-done") and one.operands[0].name in starts:
                found[starts.pop(one.operands[0].name)] += num_times[computation.name]
            elif one.opcode == "collective-permute":
                found[False] += num_times[computation.name]
    return found


def fused_bytes(module: Module) -> float:
    """Bytes that fusions read and write; a slice reads what it writes."""
    total = 0.0
    for one in module.main.instructions:
        if one.opcode == "fusion":
            written = one.shape.num_bytes
            read = [module.main.shape_of(operand).num_bytes for operand in set(one.operands)]
            total += written + sum(min(size, written) if "slice" in one.name else size for size in read)
    return total


def test_gpus_run_a_ring_behind_the_kernels(absent_gpus: Any) -> None:
    """Every move of the forward pass, and in the backward pass every move but the first."""
    shape, (forward, backward) = compiled_for_gpus(absent_gpus, "ring", 4, 1024, is_causal=False)
    assert overlapped(forward) == {True: 3} and overlapped(backward) == {True: 4, False: 1}
    for module, is_backward in ((forward, False), (backward, True)):
        found = hlo.collectives(module)
        assert {one.kind for one in found} == {"collective-permute"}
        sent = cost.sent_bytes("ring", shape, 4, is_causal=False, is_backward=is_backward)
        assert sum(one.num_bytes for one in found) == sent["collective-permute"]
        kernels = [one for one in module.main.instructions if "fmha" in one.custom_call_target]
        assert len(kernels) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "tokens"), [(2, 1024), (4, 262144), (8, 8192), (16, 8192)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_ring_runs_behind_the_kernels(num_devices: int, tokens: int, is_causal: bool, absent_gpus: Any) -> None:
    """Also blocks that XLA does not merge, and a loop over two hosts."""
    shape, modules = compiled_for_gpus(absent_gpus, "ring", num_devices, tokens, is_causal=is_causal)
    for module, is_backward in zip(modules, (False, True), strict=True):
        expected = cost.collectives("ring", shape, num_devices, is_causal=is_causal, is_backward=is_backward)
        assert overlapped(module)[True] == sum(one.num_times for one in expected if one.is_hidden)
        found = hlo.collectives(module)
        assert {one.kind for one in found} == {"collective-permute"}
        direction: dict[str, bool] = {"is_causal": is_causal, "is_backward": is_backward}
        sent = cost.sent_bytes("ring", shape, num_devices, **direction)
        assert sum(one.num_times * one.num_bytes for one in found) == sent["collective-permute"]
        if num_devices <= 8:
            estimate = cost.memory_bytes("ring", shape, num_devices, **direction)
            assert fused_bytes(module) == pytest.approx(estimate, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", ["ulysses", "gathered"])
def test_the_collectives_of_other_methods_on_gpus(method: str, is_causal: bool, absent_gpus: Any) -> None:
    shape, modules = compiled_for_gpus(absent_gpus, method, 4, 1024, is_causal=is_causal)
    for module, is_backward in zip(modules, (False, True), strict=True):
        found: dict[str, float] = defaultdict(float)
        for one in hlo.collectives(module):
            found[one.kind] += hlo.sent_bytes(one.kind, sum(one.payloads(4)), 4)
        assert found == cost.sent_bytes(method, shape, 4, is_causal=is_causal, is_backward=is_backward)
