"""Kernel times by a device's own rates: never shorter than their FLOPs take at peak."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import autopar
from autopar.api.measure_step import model_flops
from autopar.cost.kernel_time import op_seconds
from autopar.frontend.kernel_flops import counted_work
from autopar.hardware.profile import MATRIX_DTYPES, HardwareProfile, known_names, load
from autopar.ir.device_program import Op
from autopar.ir.mesh import parse_mesh
from autopar.jax_interop.compat import primitive_of
from autopar.rules.convolution import _meeting_pairs
from autopar.rules.node_view import NodeView
from autopar.rules.table import rule_for
from autopar.transforms.program import program_of
from tests.planned import plan_and_candidate

PROFILES = {name: load(name) for name in known_names()}
H100 = PROFILES["h100-sxm"]
DTYPES = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float32": jnp.float32,
    "float64": jnp.float64,
    "int8": jnp.int8,
    "float8": jnp.float8_e4m3fn,
}
ONE = parse_mesh("1")


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def ops_of(step: Callable[..., Any], *args: Any, mesh: str = "1", profile: HardwareProfile = H100) -> Sequence[Op]:
    program = program_of(step, args, carry=None, donate=None)
    return plan_and_candidate(program, mesh=mesh, hardware=profile)[1].parts.device.ops


def flops_of(ops: Sequence[Op]) -> float:
    """Inside matrix units."""
    products = sum(
        2.0 * op.gemm.batch * op.gemm.m * op.gemm.n * op.gemm.k for op in ops if op.gemm and op.kind == "gemm"
    )
    return products + sum(flops for op in ops for _, flops in op.matrix_flops)


# -- every profile, layout and dtype -----------------------------------------------------------------

_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


def _layouts(rank: int) -> list[tuple[str, str, str]]:
    s = _SPATIAL[rank]
    return [
        (f"N{s}C", f"{s}IO", f"N{s}C"),
        (f"NC{s}", f"OI{s}", f"NC{s}"),
        (f"{s}NC", f"O{s}I", f"N{s}C"),
        (f"C{s}N", f"I{s}O", f"{s}CN"),
    ]


def _convolution(dtype: str, rank: int, layout: tuple[str, str, str], more: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A step with a dense convolution, large enough that its launch does not matter."""
    sizes = {"N": 64, "C": 512, "I": 512, "O": 512, **dict.fromkeys("DHW", {1: 256, 2: 16, 3: 8}[rank])}
    image = array(*(sizes[c] for c in layout[0]), dtype=DTYPES[dtype])
    taps = sizes | dict.fromkeys("DHW", 3)
    kernel = array(*(taps[c] for c in layout[1]), dtype=DTYPES[dtype])
    arguments: dict[str, Any] = {"window_strides": (1,) * rank, "padding": "SAME", **more}

    def step(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, dimension_numbers=layout, preferred_element_type=DTYPES[dtype], **arguments
        )

    return step, [image, kernel]


def _product(dtype: str, contracted: tuple[int, int], batched: bool) -> tuple[Any, list[Any]]:
    sizes = [[4096, 4096], [4096, 4096]]
    dims = [[int(not contracted[0])], [int(not contracted[1])]]
    if batched:
        sizes, dims = [[2, *each] for each in sizes], [[d + 1 for d in each] for each in dims]
    numbers = ((contracted[0] + batched,), (contracted[1] + batched,)), ((0,), (0,)) if batched else ((), ())

    def step(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, numbers, preferred_element_type=DTYPES[dtype])

    return step, [array(*each, dtype=DTYPES[dtype]) for each in sizes]


CASES = [
    *(
        pytest.param(lambda dtype, c=c, b=b: _product(dtype, c, b), id=f"product-{c[0]}{c[1]}{'-batched' if b else ''}")
        for c, b in itertools.product([(1, 0), (0, 0), (1, 1), (0, 1)], [False, True])
    ),
    *(
        pytest.param(lambda dtype, r=r, one=one: _convolution(dtype, r, one, {}), id=f"convolution-{'-'.join(one)}")
        for r in (1, 2, 3)
        for one in _layouts(r)
    ),
    *(
        pytest.param(lambda dtype, more=more: _convolution(dtype, 2, _layouts(2)[0], more), id=f"convolution-{name}")
        for name, more in {
            "strided": {"window_strides": (2, 2)},
            "dilated": {"rhs_dilation": (2, 2)},
            "transposed": {"lhs_dilation": (2, 2), "padding": ((1, 2), (2, 1))},
        }.items()
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_no_kernel_runs_above_the_peak_nor_far_below(case: Callable[[str], tuple[Any, list[Any]]]) -> None:
    """On every profile, in every dtype that operands and result share."""
    for dtype in MATRIX_DTYPES:
        step, args = case(dtype)
        with jax.enable_x64(True):
            ops, result = ops_of(step, *args), jax.eval_shape(step, *args)
        kernels = [op for op in ops if op.kind in ("gemm", "convolution")]
        assert len(kernels) == 1
        counted = _needed(step, args)
        assert flops_of(ops) == counted
        traffic = sum(math.prod(a.shape) * a.dtype.itemsize for a in (*args, result))
        for profile in PROFILES.values():
            own = profile
            seconds = sum(op_seconds(op, ONE, own) for op in ops)
            peak = profile.peak_rate(dtype)
            assert counted / seconds <= peak, (profile.name, dtype)
            if counted / traffic > 4 * peak / profile.hbm_bytes_per_s:
                assert counted / (seconds - len(ops) * profile.kernel_launch_s) >= 0.1 * peak, (profile.name, dtype)


def _needed(step: Callable[..., Any], args: Sequence[Any]) -> float:
    """Multiplications and additions of elements, by the equation's own numbers and by counting places one by one."""
    with jax.enable_x64(True):
        (equation,), result = jax.make_jaxpr(step)(*args).eqns, jax.eval_shape(step, *args).shape
    params, (left, right) = equation.params, [a.shape for a in args]
    if equation.primitive.name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(result) * math.prod(left[d] for d in contracting)
    lhs, rhs, out = params["dimension_numbers"]
    flops = 2.0 * result[out[0]] * result[out[1]] * right[rhs[1]]
    for i, (d, k, o) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        flops *= _pairs_one_by_one(
            left[d],
            right[k],
            result[o],
            params["window_strides"][i],
            params["padding"][i][0],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
    return flops


def _pairs_one_by_one(size: int, taps: int, places: int, stride: int, low: int, dilation: int, spread: int) -> int:
    at = np.arange(places)[:, None] * stride + np.arange(taps)[None] * spread - low
    return int(((at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)).sum())


# -- convolutions --------------------------------------------------------------------------------


def test_places_that_meet_elements_are_counted() -> None:
    numbers = random.Random(0)
    for _ in range(500):
        one = [numbers.randint(1, 9), numbers.randint(1, 5), numbers.randint(1, 12), numbers.randint(1, 4)]
        one += [numbers.randint(-2, 6), numbers.randint(1, 4), numbers.randint(1, 4)]
        assert _meeting_pairs(*one) == _pairs_one_by_one(*one), one


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"window_strides": (2, 2)},
        {"window_strides": (3, 2), "padding": ((0, 1), (2, 0))},
        {"rhs_dilation": (2, 1)},
        {"feature_group_count": 4},
        {"feature_group_count": 64},
    ],
    ids=["dense", "strided", "odd", "dilated", "grouped", "depthwise"],
)
def test_both_gradients_take_the_arithmetic_of_the_convolution(more: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), **more}
    groups = arguments.get("feature_group_count", 1)

    def loss(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **arguments)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    x, w = array(8, 16, 16, 64), array(3, 3, 64 // groups, 128)
    forward = flops_of(ops_of(loss, x, w))
    assert forward > 0
    assert flops_of(ops_of(jax.grad(loss, (0, 1)), x, w)) == pytest.approx(3 * forward)


def test_a_device_counts_its_own_part() -> None:
    """However a convolution is split: by batch, by channels, in space."""

    def step(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = array(8, 64, 64, 64), array(3, 3, 64, 128)
    whole = flops_of(ops_of(step, x, w))
    for pin in ({"x": "P('data')"}, {"w": "P(None, None, None, 'data')"}, {"x": "P(None, 'data')"}):
        pins = {path: eval(spec, {"P": jax.sharding.PartitionSpec}) for path, spec in pin.items()}
        program = program_of(step, (x, w), carry=None, donate=None)
        made = plan_and_candidate(program, mesh="data=4", hardware=H100, pin=pins)[1]
        assert flops_of(made.parts.device.ops) == pytest.approx(whole / 4), pin


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_no_step_of_convolutions_is_predicted_above_the_peak(name: str) -> None:
    def step(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    args = array(64, 64, 64, 384), array(3, 3, 384, 192)
    flops = _needed(step, args)
    told = autopar.plan(step, *args, mesh="1", hardware=name).prediction
    rate = flops / told.step_time_s
    assert 0.45 * PROFILES[name].peak_rate("bfloat16") < rate <= PROFILES[name].peak_rate("bfloat16")
    if PROFILES[name].xla_estimator is not None:  # one price for all sizes: its error, and another figure
        assert told.xla_step_time_s == pytest.approx(10e-6)


# -- operations without a rule -------------------------------------------------------------------


def _attention(x: Any, y: Any, *, causal: bool, blocks: int = 32, by_place: bool = False) -> Any:
    """A kernel in the shape of a flash attention: a loop over blocks of keys, as long as the mask lets it be. What it
    computes may depend on its place in the batch, so that devices cannot share it."""
    length, size = x.shape[1], x.shape[1] // blocks

    def kernel(q: Any, k: Any, out: Any) -> None:
        at = pl.program_id(1)

        def block(i: Any, total: Any) -> Any:
            return total + jnp.dot(jnp.dot(q[...], k[pl.ds(i * size, size), :].T), k[pl.ds(i * size, size), :])

        last = lax.div(at * size + size - 1, size) + 1 if causal else blocks
        first = lax.convert_element_type(pl.program_id(0) if by_place else 0, q.dtype)
        out[...] = lax.fori_loop(0, last, block, jnp.full(q.shape, first, q.dtype))

    whole = pl.BlockSpec((None, length, x.shape[2]), lambda b, i: (b, 0, 0))
    part = pl.BlockSpec((None, size, x.shape[2]), lambda b, i: (b, i, 0))
    return pl.pallas_call(
        kernel, grid=(x.shape[0], blocks), in_specs=[part, whole], out_specs=part, out_shape=x, name="blockwise"
    )(x, y)


@pytest.mark.parametrize("causal", [False, True])
def test_a_pallas_kernel_is_counted_over_its_grid(causal: bool) -> None:
    x = array(8, 2048, 64)
    whole = 4.0 * 8 * 2048 * 2048 * 64
    wanted = whole * (33 / 64 if causal else 1)  # on and below the diagonal, of 32 x 32 blocks
    (equation,) = jax.make_jaxpr(lambda x, y: _attention(x, y, causal=causal))(x, x).eqns
    work = counted_work(equation)
    assert work is not None
    assert dict(work[1]) == {"bfloat16": pytest.approx(wanted)}


def test_a_branch_that_is_not_taken_costs_nothing() -> None:
    def kernel(x: Any, out: Any) -> None:
        @pl.when(pl.program_id(0) % 4 == 0)
        def _() -> None:
            out[...] = jnp.dot(x[...], x[...])

    def step(x: Any) -> Any:
        spec = pl.BlockSpec((None, 64, 64), lambda i: (i, 0, 0))
        return pl.pallas_call(kernel, grid=(8,), in_specs=[spec], out_specs=spec, out_shape=x)(x)

    (equation,) = jax.make_jaxpr(step)(array(8, 64, 64, dtype=jnp.float32)).eqns
    work = counted_work(equation)
    assert work is not None and dict(work[1]) == {"float32": 2 * 2.0 * 64**3}


def test_kernels_of_any_kind_can_be_counted() -> None:
    """An empty grid, a loop of a length that data says, a division by nothing, and numbers that are not whole."""
    x = array(8, 64, 64, dtype=jnp.float32)

    def looped(x: Any, length: Any, out: Any) -> None:
        half = lax.convert_element_type(pl.program_id(0), jnp.float32) / 2.0
        nothing = lax.div(pl.program_id(0), jnp.int32(0))
        out[...] = lax.fori_loop(0, length[0], lambda _, y: jnp.dot(y, y) * half, x[...])
        out[...] += lax.fori_loop(0, nothing, lambda _, y: jnp.dot(y, y), x[...])

    def step(x: Any, length: Any, grid: int) -> Any:
        spec = pl.BlockSpec((None, 64, 64), lambda i: (i, 0, 0))
        whole = pl.BlockSpec((1,), lambda i: (0,))
        return pl.pallas_call(looped, grid=(grid,), in_specs=[spec, whole], out_specs=spec, out_shape=x)(x, length)

    for grid in (0, 8):
        (equation,) = jax.make_jaxpr(lambda x, length, grid=grid: step(x, length, grid))(
            x, array(1, dtype=jnp.int32)
        ).eqns
        work = counted_work(equation)
        assert work is not None
        assert sum(flops for _, flops in work[1]) == grid * 2 * 2.0 * 64**3  # a trip each: it cannot be known


def test_what_has_no_rule_is_priced_by_its_arithmetic_and_named_with_its_seconds() -> None:
    def step(x: Any, y: Any, w: Any) -> Any:
        return _attention(x, y, causal=True, by_place=True) @ w

    x, w = array(64, 2048, 64), array(64, 64)
    plan = autopar.plan(step, x, x, w, mesh="8", hardware="h100-sxm")
    flops = 4.0 * 64 * 2048 * 2048 * 64 * 33 / 64
    (one,) = plan.replicated
    assert (one.name, one.count) == ("blockwise", 1) and "test_prices.py" in one.source
    assert flops / H100.peak_rate("bfloat16") < one.time_s < plan.prediction.step_time_s
    assert model_flops(program_of(step, (x, x, w), carry=None, donate=None).graph) == {
        "bfloat16": pytest.approx(flops + 2.0 * 64 * 2048 * 64 * 64)
    }
    assert one.time_s > 0.7 * plan.prediction.step_time_s
    assert autopar.Plan.from_json(plan.to_json()).replicated == plan.replicated
    assert autopar.plan(step, x, x, w, mesh="1", hardware="h100-sxm").replicated == ()


_MYSTERY = primitive_of("mystery_of_prices", lambda x: x + 1.0, result=lambda x: x)


def test_what_cannot_be_counted_takes_its_bytes() -> None:
    x = array(4096, 4096, dtype=jnp.float32)
    (op,) = [op for op in ops_of(lambda x: _MYSTERY.bind(x * 2.0) + 1.0, x) if op.kind == "other"]
    size = 4096 * 4096 * 4
    assert op_seconds(op, ONE, H100) >= 2 * size / H100.hbm_bytes_per_s


_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"


def _cudnn(name: str, layout: int, mask: Any, *operands: Any, window: int | None = None) -> Any:
    """One of cuDNN's attentions as JAX binds it; it traces without cuDNN."""
    module = pytest.importorskip(_CUDNN)
    primitive = getattr(module, f"_dot_product_attention_{name}_p_wrapper")
    more: dict[str, Any] = {"is_training": True} if name == "fwd" else {}
    if "score_mod" in inspect.signature(module.dot_product_attention).parameters:
        more["score_mod"] = None
    return lambda *args: primitive.bind(
        *args,
        scale=1.0,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask(module.MaskType),
        layout=layout,
        sliding_window_length=window,
        **more,
    )


@pytest.mark.contract
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("masked", ["NO_MASK", "CAUSAL"])
def test_attention_of_cudnn_is_counted_by_its_shapes(layout: int, masked: str) -> None:
    b, t, s, n, h = 4, 256, 512, 8, 64
    query, key = ((b, t, n, h), (b, s, n, h)) if layout == 0 else ((b, n, t, h), (b, n, s, h))
    nothing = array(0)
    q, k = array(*query), array(*key)
    forward = _cudnn("fwd", layout, lambda masks: masks[masked], q, k)
    operands = [q, k, k, *[nothing] * 7]
    (equation,) = jax.make_jaxpr(forward)(*operands).eqns
    pairs = t * (t + 1) / 2 if masked == "CAUSAL" else t * s
    work = counted_work(equation)
    assert work == (0.0, (("bfloat16", 4.0 * b * n * pairs * h),))
    backward = _cudnn("bwd", layout, lambda masks: masks[masked])
    (equation,) = jax.make_jaxpr(backward)(*operands, array(b, n, t, dtype=jnp.float32), q, q).eqns
    work = counted_work(equation)
    assert work == (0.0, (("bfloat16", 10.0 * b * n * pairs * h),))


def test_a_kernel_that_a_user_gave_a_rule_is_counted_in_parts() -> None:
    """What is counted of it is no part of what tells programs apart, and is spread over its loops."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.dot(x[...], x[...])

    def step(x: Any) -> Any:
        spec = pl.BlockSpec((None, 64, 64), lambda i: (i, 0, 0))
        return pl.pallas_call(kernel, grid=(x.shape[0],), in_specs=[spec], out_specs=spec, out_shape=x, name="squares")(
            x
        )

    autopar.register_rule("squares", "b i j -> b i j", local=step)
    x = array(64, 64, 64, dtype=jnp.float32)
    whole = flops_of(ops_of(step, x))
    assert whole == 64 * 2.0 * 64**3
    pin = {"x": jax.sharding.PartitionSpec("data")}
    made = plan_and_candidate(program_of(step, (x,), carry=None, donate=None), mesh="data=8", hardware=H100, pin=pin)[1]
    assert flops_of(made.parts.device.ops) == whole / 8


def test_the_arithmetic_inside_a_shard_map_runs_on_matrix_units() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(x: Any, w: Any) -> Any:
        spec = jax.sharding.PartitionSpec
        return jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data"))(
            x, w
        )

    x, w = array(4096, 4096), array(4096, 4096)
    ops = ops_of(step, x, w, mesh="data=4")
    assert flops_of(ops) == 2.0 * 4096**3 / 4
    seconds = sum(op_seconds(op, parse_mesh("data=4"), H100) for op in ops)
    assert 2.0 * 4096**3 / 4 / H100.peak_rate("bfloat16") < seconds < 3e-4


# -- what profiles say ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_caches_are_the_devices_own(name: str) -> None:
    profile = PROFILES[name]
    if profile.xla_target is None:
        assert profile.near_cache_bytes < profile.cache_bytes
    else:
        assert profile.cache_bytes == profile.xla_target["l2_cache_size"]
        assert profile.near_cache_bytes == 2048 * profile.xla_target["core_count"]


def test_what_is_read_again_comes_out_of_the_caches_of_the_device() -> None:
    """A table of 64 MiB fits B200's cache, and not H100's."""
    table = array(2048, 8192, dtype=jnp.float32)
    size = 2048 * 8192 * 4

    def step(y: Any, table: Any) -> Any:
        return y + table

    ops = {
        name: ops_of(step, array(8, 2048, 8192, dtype=jnp.float32), table, profile=PROFILES[name])
        for name in ("h100-sxm", "b200")
    }
    (hopper,), (blackwell,) = ops["h100-sxm"], ops["b200"]
    assert hopper.reread_bytes == 0 and blackwell.reread_bytes == pytest.approx(7 * size)


def test_a_tanh_costs_what_the_device_takes_for_it() -> None:
    """Of a CPU's 1.5 GFLOP/s, XLA's 467 operations for an H100 would be 60 times what was measured; an H100 itself computes
    1.1e12 of them a second (benchmarks/results/gpu.md, 8 tanhs)."""
    x = array(1 << 20, dtype=jnp.float32)
    for name, seconds in (("cpu-host", 7e-9), ("h100-sxm", 1 / 1.13e12)):
        (op,) = ops_of(jnp.tanh, x, profile=PROFILES[name])
        assert op.flops / PROFILES[name].vector_flops_per_s / x.size == pytest.approx(seconds, rel=0.1)


def test_rules_and_programs_count_equal_arithmetic() -> None:
    def step(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    args = array(8, 15, 16, 32), array(3, 5, 32, 64)
    graph = program_of(step, args, carry=None, donate=None).graph
    (view,) = [NodeView.of(node, graph) for node in graph.nodes]
    rule = rule_for(view)
    assert rule is not None
    by_rule = rule.flops_per_point * math.prod(factor.size for factor in rule.factors)
    assert by_rule == pytest.approx(_needed(step, args)) == flops_of(ops_of(step, *args))


def test_counted_work_tells_no_programs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was saved before it was counted is still the step's."""
    x = array(8, 2048, 64)

    def step(x: Any, y: Any) -> Any:
        return _attention(x, y, causal=True)

    def fingerprint() -> str:
        return autopar.plan(step, x, x, mesh="1", hardware="h100-sxm").program.fingerprint

    counted = fingerprint()
    monkeypatch.setattr("autopar.frontend.from_jaxpr.counted_work", lambda _: None)
    assert fingerprint() == counted
