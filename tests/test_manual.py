"""Manual regions: equal results, chosen by the solver where they are faster, with the predicted bytes sent."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_rules import CASES

import autopar
from autopar.frontend.equations import Equation, LiteralOperand
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.tracing import trace
from autopar.ir.mesh import parse_mesh
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import partition_spec
from autopar.plans.records import ManualRegion
from autopar.rules.node_view import NodeView
from autopar.rules.strategies import enumerate_strategies
from autopar.rules.table import rule_for
from autopar.runtime.jit import make_mesh
from autopar.runtime.manual.region import run_region
from autopar.runtime.manual.table import LOCAL
from autopar.runtime.manual.top_k import sharded_top_k
from autopar.xla_compiler import hlo_collectives as hlo
from autopar.xla_compiler.compiler import Compiler

RNG = np.random.default_rng(0)


class InParts:
    """A function whose last equation is run as a manual region, by each strategy that runs it so; in one program."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], mesh: str) -> None:
        shape = parse_mesh(mesh)
        self.mesh = make_mesh(shape)
        self.traced = trace(function, args)
        graph = graph_of(self.traced, ())
        rule = rule_for(NodeView.of(graph.nodes[-1], graph))
        assert rule is not None and rule.manual
        pending = [i for i, f in enumerate(rule.factors) if f.reduction]
        strategies = enumerate_strategies(rule.factors, shape, manual=rule.manual)
        self.strategies = [s for s in strategies if any(s.axes[f] for f in rule.manual)]
        assert self.strategies
        self.regions = [
            ManualRegion(
                node=len(self.traced.equations) - 1,
                primitive="",
                path="",
                operands=tuple(strategy.sharding(dims) for dims in rule.operands),
                results=tuple(strategy.sharding(dims, pending) for dims in rule.results),
            )
            for strategy in self.strategies
        ]
        everywhere = NamedSharding(self.mesh, P())
        options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        self.compiled = jax.jit(self.run, in_shardings=everywhere).lower(*args).compile(options)

    def run(self, *args: Any) -> Any:
        values = dict(zip(self.traced.inputs, jax.tree.leaves(args), strict=True)) | dict(self.traced.constants)

        def operands_of(equation: Equation) -> list[Any]:
            return [v.value if isinstance(v, LiteralOperand) else values[v] for v in equation.operands]

        *before, last = self.traced.equations
        for equation in before:
            results = jax_compat.bind(equation.source, operands_of(equation))
            values |= dict(zip(equation.results, results, strict=True))
        return [self._region(region, last, operands_of(last)) for region in self.regions]

    def _region(self, region: ManualRegion, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        results = run_region(region, equation.source, operands, self.mesh, [None] * len(region.results))
        made = zip(results, region.results, strict=True)
        return [lax.with_sharding_constraint(v, NamedSharding(self.mesh, partition_spec(s))) for v, s in made]

    def __call__(self, *args: Any) -> Iterator[tuple[str, list[Any]]]:
        """A strategy in words, and its results."""
        found = self.compiled(*jax.device_put(args, NamedSharding(self.mesh, P())))
        return ((str(s.axes), results) for s, results in zip(self.strategies, found, strict=True))


def in_parts(function: Callable[..., Any], args: Sequence[Any], mesh: str) -> Iterator[tuple[str, list[Any]]]:
    return InParts(function, args, mesh)(*args)


def equal(got: Any, expected: Any, words: str) -> None:
    """The same bits, but for which NaN it is."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.floating):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)  # NumPy takes no NaN of bfloat16 for one
            number = ~np.isnan(b)
            np.testing.assert_array_equal(np.signbit(a)[number], np.signbit(b)[number], err_msg=words)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=words)


def with_ties(dtype: Any) -> np.ndarray:
    """Few distinct values, so that most are equal to others in other parts; zeros of both signs, NaNs, infinities."""
    x = RNG.integers(-2, 3, (8, 64)).astype(np.float32)
    if jnp.issubdtype(dtype, jnp.floating):
        x[x == 0] = RNG.choice([0.0, -0.0], (x == 0).sum())
        x[1, 5:60:9], x[2, ::7], x[3] = np.nan, np.inf, np.nan
    return np.asarray(jnp.asarray(x, dtype))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("k", [1, 24, 64])  # parts are of 8, 16 or 32
def test_top_k_is_that_of_the_whole_with_ties_and_nans(k: int, dtype: str, mesh: str) -> None:
    x = with_ties(dtype)
    for words, got in in_parts(lambda x: lax.top_k(x, k), [x], mesh):
        equal(got, lax.top_k(x, k), words)
    for words, got in in_parts(lambda x: lax.top_k(x, k, axis=0), [x.T], mesh):
        equal(got, lax.top_k(x.T, k, axis=0), words)


@pytest.mark.parametrize("mesh", ["8", "2x4"])
def test_approximate_top_k_is_exact_where_that_of_the_whole_is(mesh: str) -> None:
    x = jnp.asarray(RNG.permutation(4 * 64).reshape(4, 64).astype(np.float32))
    for function in (lax.approx_max_k, lax.approx_min_k):
        for words, got in in_parts(lambda x, function=function: function(x, 12), [x], mesh):
            equal(got, function(x, 12), words)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_first_of_the_largest_is_that_of_the_whole(dtype: str, mesh: str) -> None:
    x = with_ties(dtype)
    for function in (lax.argmax, lax.argmin):
        for axis, index in ((0, np.int32), (1, np.int32), (1, np.int8)):
            for words, got in in_parts(lambda x, f=function, a=axis, i=index: f(x, a, i), [x], mesh):
                equal(got, [function(x, axis, index)], words)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_a_cumulative_operation_goes_on_where_the_part_before_ends(name: str, reverse: bool, mesh: str) -> None:
    def scan(x: Any, axis: int = 1) -> Any:
        return getattr(lax, name)(x, axis=axis, reverse=reverse)

    x = RNG.uniform(-1, 1, (8, 24)).astype(np.float32)
    for axis in (0, 1):
        for words, got in in_parts(lambda x, a=axis: scan(x, a), [x], mesh):
            np.testing.assert_allclose(got[0], scan(x, axis), rtol=1e-5, atol=1e-6, err_msg=words)
    if name != "cumlogsumexp":
        whole = RNG.integers(-3, 4, (4, 8)).astype(np.int32)  # parts of one element
        for words, got in in_parts(scan, [whole], mesh):
            equal(got, [scan(whole)], words)
    if name in ("cummax", "cummin"):
        ties = with_ties("float32")
        for words, got in in_parts(scan, [ties], mesh):
            np.testing.assert_array_equal(got[0], scan(ties), err_msg=words)


STARTS = [-5, 0, 1, 3, 7, 8, 11, 14, 16, 31, 100]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("window", [1, 3, 13, 31])  # parts are of 4, 8 or 16
def test_a_window_is_written_and_read_wherever_it_falls(window: int, mesh: str) -> None:
    def write(x: Any, update: Any, *at: Any) -> Any:
        return lax.dynamic_update_slice_p.bind(x, update, *at)

    def read(x: Any, *at: Any) -> Any:
        return lax.dynamic_slice_p.bind(x, *at, slice_sizes=(window, 3))

    x = RNG.integers(1, 100, (32, 8)).astype(np.int32)
    update = -RNG.integers(1, 100, (window, 3)).astype(np.int32)
    zero = np.int32(0)
    writes, reads = InParts(write, [x, update, zero, zero], mesh), InParts(read, [x, zero, zero], mesh)
    for start, other in zip(STARTS, [0, 2, 7, 1, -1, 4, 5, 3, 6, 5, 0], strict=True):
        at = np.int32(start), np.int32(other)
        for words, got in writes(x, update, *at):
            equal(got, [write(x, update, *at)], f"{words} at {at}")
        for words, got in reads(x, *at):
            equal(got, [read(x, *at)], f"{words} at {at}")


@pytest.mark.parametrize("start", [np.uint8(200), np.int16(-4), np.int16(100), np.uint32(2**32 - 3), np.uint32(5)])
def test_a_start_of_any_type_is_moved_to_where_the_window_fits(start: Any) -> None:
    def write(x: Any, update: Any, at: Any) -> Any:
        return lax.dynamic_update_slice_p.bind(x, update, at)

    def read(x: Any, at: Any) -> Any:
        return lax.dynamic_slice_p.bind(x, at, slice_sizes=(9,))

    x, update = np.arange(160, dtype=np.float32), -np.ones(9, np.float32)
    for words, got in in_parts(write, [x, update, start], "8"):
        equal(got, [jax.jit(write)(x, update, start)], words)
    for words, got in in_parts(read, [x, start], "8"):
        equal(got, [jax.jit(read)(x, start)], words)


def test_windows_of_truths_and_of_keys() -> None:
    truths, keys = np.arange(64) % 3 == 0, jax.random.split(jax.random.key(0), 64)
    for words, got in in_parts(lambda x, i: lax.dynamic_slice(x, (i,), (12,)), [truths, np.int32(7)], "2x4"):
        equal(got, [truths[7:19]], words)
    for words, got in in_parts(lambda x, i: lax.dynamic_slice(x, (i,), (12,)), [keys, np.int32(7)], "2x4"):
        equal(jax.random.key_data(got[0]), jax.random.key_data(keys[7:19]), words)


#: Groups that begin and end inside parts, are empty, hold all rows, and leave rows over.
GROUPS = [
    [3, 5, 0, 9, 1, 6, 0, 8],
    [0, 0, 0, 0, 32, 0, 0, 0],
    [0] * 8,
    [1, 2, 3, 4, 5, 4, 3, 2],
    [32, 0, 0, 0, 0, 0, 0, 0],
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("differentiated", ["", "rows", "matrices"])
def test_ragged_products_and_their_gradients(differentiated: str, mesh: str) -> None:
    x, w = RNG.standard_normal((32, 4)).astype(np.float32), RNG.standard_normal((8, 4, 6)).astype(np.float32)
    ct = RNG.standard_normal((32, 6)).astype(np.float32)

    def product(x: Any, w: Any, groups: Any, ct: Any) -> Any:
        if not differentiated:
            return lax.ragged_dot(x, w, groups)
        by_rows, by_matrices = jax.vjp(lambda x, w: lax.ragged_dot(x, w, groups), x, w)[1](ct)
        return by_rows if differentiated == "rows" else by_matrices

    parts = InParts(product, [x, w, np.array(GROUPS[0], np.int32), ct], mesh)
    assert parts.traced.equations[-1].primitive == "ragged_dot_general"
    for sizes in GROUPS:
        groups = np.array(sizes, np.int32)
        for words, got in parts(x, w, groups, ct):
            np.testing.assert_allclose(
                got[0], product(x, w, groups, ct), rtol=1e-4, atol=1e-5, err_msg=f"{words} of {sizes}"
            )


def test_what_rules_call_manual_has_a_part() -> None:
    """The cases of the rules cover the table."""
    views = (NodeView(name, params, operands, results) for name, operands, results, params, _ in CASES)
    manual = {view.primitive for view in views if (rule := rule_for(view)) is not None and rule.manual}
    assert manual == set(LOCAL)


def test_top_k_of_a_part_is_of_use_by_itself() -> None:
    """As sampling and vector search will call it, in a region of their own."""
    x = RNG.standard_normal((2, 4096)).astype(np.float32)
    mesh = make_mesh(parse_mesh("2x4"))

    def best(part: jax.Array) -> Any:
        return sharded_top_k(part, 10, ("data", "model"))

    run = jax.shard_map(best, mesh=mesh, in_specs=P(None, ("data", "model")), out_specs=P(), check_vma=False)
    equal(jax.jit(run)(x), lax.top_k(x, 10), "")
    sent = hlo.collectives(jax.jit(run).lower(x).compile().as_text() or "")
    assert {one.kind for one in sent} == {"all-gather"}
    assert sum(one.num_elements for one in sent) == 2 * 2 * 10 * 8


# -- chosen, and compiled as predicted -------------------------------------------------------


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def sample(hidden: jax.Array, table: jax.Array) -> Any:
    return lax.top_k(hidden @ table, 40)


def likeliest(hidden: jax.Array, table: jax.Array) -> Any:
    return jnp.argmax(hidden @ table, 1)


def totals(x: jax.Array) -> Any:
    return lax.cumsum(jnp.sin(x), 1, reverse=True)


def decode(cache: jax.Array, new: jax.Array, position: jax.Array) -> Any:
    cache = lax.dynamic_update_slice(cache, new, (0, position, 0))
    return cache, jnp.sum(jnp.exp(cache), 1), lax.dynamic_slice(cache, (0, position, 1), (3, 128, 512))


Step = tuple[Callable[..., Any], Sequence[Any], dict[str, int]]

#: Steps in which the dim that is worked along is split: a vocabulary because its table is large, a sequence because
#: it is given so, a cache because no other of its dims divides.
STEPS: dict[str, Step] = {
    "top_k": (sample, [array(3, 512), array(512, 2**17)], {}),
    "argmax": (likeliest, [array(3, 512), array(512, 2**17)], {}),
    "cumsum": (totals, [array(3, 2**22)], {"x": 1}),
    "window": (decode, [array(3, 8192, 513), array(3, 5, 513), array(dtype=jnp.int32)], {}),
}


def step_of(name: str, mesh: str) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """A step, its arguments and its pins on a mesh."""
    step, args, split = STEPS[name]
    axes = parse_mesh(mesh).axis_names
    return step, args, {path: P(*[None] * dim, axes) for path, dim in split.items()}


def made_up(args: Sequence[Any]) -> list[Any]:
    return [
        RNG.standard_normal(a.shape).astype(a.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else np.int32(4093)
        for a in args
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("name", STEPS)
def test_a_region_is_planned_and_run_and_sends_little(name: str, mesh: str) -> None:
    step, args, pin = step_of(name, mesh)
    plan = autopar.plan(step, *args, mesh=mesh, hardware="h100-sxm", pin=pin)
    assert plan.regions, plan.strategy
    planned = autopar.parallelize(step, plan=plan)
    sent = hlo.collectives(planned.lower(*args).compile().as_text() or "")
    assert sum(one.num_bytes for one in sent) < 2**21, sent
    values = made_up(args)
    for got, expected in zip(jax.tree.leaves(planned(*values)), jax.tree.leaves(jax.jit(step)(*values)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8", "2x4"])
def test_the_gpu_compiler_sends_what_is_predicted(mesh: str, absent_gpus: Compiler) -> None:
    for name in STEPS:
        step, args, pin = step_of(name, mesh)
        told = autopar.verify(step, *args, mesh=mesh, hardware="h100-sxm", pin=pin, compiler=absent_gpus)
        assert told.plan.regions, name
        assert all(match.figure.holds for match in told.collectives), str(told)
        assert not told.unpredicted, str(told)


@pytest.mark.slow
def test_a_custom_call_runs_on_each_part_in_the_gpu_program(absent_gpus: Compiler) -> None:
    """One that XLA's GPU plugin knows: JAX's own generator of random words. Without its part XLA would gather."""
    name = "cu_threefry2x32_ffi"

    def words(*keys_and_counts: jax.Array) -> Any:
        out = jax.ShapeDtypeStruct(keys_and_counts[2].shape, jnp.uint32)
        return jax.ffi.ffi_call(name, (out, out))(*keys_and_counts)

    def step(x: jax.Array) -> jax.Array:
        counts = (jnp.cos(x) > 0.5).astype(jnp.uint32)
        first, second = words(counts + 1, counts * 3, counts, counts + 2)
        return jnp.sin((first ^ second).astype(jnp.float32))

    rule = "rows columns, rows columns, rows columns, rows columns -> rows columns, rows columns"
    autopar.register_rule(name, rule, local=words, flops_per_point=100.0)
    told = autopar.verify(step, array(4096, 4096), mesh="2x4", hardware="h100-sxm", compiler=absent_gpus)
    assert [region.primitive for region in told.plan.regions] == ["ffi_call"]
    assert not told.collectives and not told.unpredicted, str(told)
    found = re.findall(rf'= \(?u32\[([\d,]+)\][^=]*custom-call\(.*custom_call_target="{name}"', told.compiled.hlo_text)
    assert [math.prod(map(int, shape.split(","))) for shape in found] == [4096 * 4096 // 8]


def test_a_plan_keeps_its_regions() -> None:
    step, args, _ = step_of("top_k", "8")
    plan = autopar.plan(step, *args, mesh="8", hardware="h100-sxm")
    again = autopar.Plan.from_json(plan.to_json())
    assert again.regions == plan.regions and dataclasses.replace(again, regions=()) != plan
