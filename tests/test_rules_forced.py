"""Every strategy of every rule, forced, computes what the unsharded primitive computes, and costs what the rule says.

The test loops over the table: each primitive has a sample program below. One compiled program per sample and mesh holds
all strategies of all its equations: operands and results are constrained to the strategy's shardings. XLA's program may
then contain only an all-reduce for the summed factors and, for a manual region, its own gathers and halo slices.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.tracing import trace
from autopar.inference.kernels.paged_attention import attend_paged
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.ir.mesh import MeshShape, parse_mesh
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import partition_spec
from autopar.plans.records import ManualRegion
from autopar.rules.control_flow import BORDERS
from autopar.rules.factors import Reduction, Rule
from autopar.rules.halo_window import Window
from autopar.rules.node_view import NodeView
from autopar.rules.strategies import Strategy, enumerate_strategies
from autopar.rules.table import RULES, rule_for
from autopar.runtime.manual.region import run_region
from autopar.xla_compiler import hlo_collectives as hlo

Sample = tuple[Callable[..., Any], Sequence[Any]]

RNG = np.random.default_rng(0)
X = RNG.uniform(0.1, 0.9, (16, 8)).astype(np.float32)
V = X.reshape(-1)[:16]
N = RNG.integers(1, 9, 16).astype(np.int32)
B = N > 4
IDS = RNG.permutation(16)[:8].astype(np.int32)
MATRICES = np.stack([a @ a.T + np.eye(4) for a in RNG.uniform(0.1, 0.9, (8, 4, 4))]).astype(np.float32)
#: So wide that a part has several elements: of one alone XLA has little to send, and sends it once for several nodes.
WIDE = np.random.default_rng(1).uniform(0.1, 0.9, (16, 64)).astype(np.float32)
IMAGE, KERNEL = RNG.random((8, 4, 4, 8), np.float32), RNG.random((3, 3, 8, 8), np.float32)

#: Words of a key and of a counter that each generator takes.
RANDOM_WORDS = (("threefry2x32", 2, 2), ("threefry4x32", 4, 4), ("philox2x32", 1, 2), ("philox4x32", 2, 4))

#: Modules that hold primitives no public function makes.
MODULES = ("jax.lax", "jax.lax.linalg", "jax._src.lax.lax", "jax._src.lax.linalg", "jax._src.ad_util")
MODULES += ("jax._src.lax.windowed_reductions", "jax._src.random.prng", "jax._src.lax.special", "jax._src.pjit")
MODULES += ("jax._src.lax.control_flow.conditionals",)
MODULES += tuple(f"jax._src.random.{name}" for name in ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32"))


def bind(name: str, **params: Any) -> Callable[..., Any]:
    """A function that binds one primitive, found by its name."""
    for module in map(importlib.import_module, MODULES):
        for item in vars(module).values():
            if type(item).__name__ == "Primitive" and item.name == name:
                return lambda *operands: item.bind(*operands, **params)
    raise KeyError(name)


def each(*functions: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: [function(*args) for function in functions]


def named(names: str) -> Callable[..., Any]:
    return each(*(getattr(lax, name) for name in names.split() if hasattr(lax, name)))  # older JAX has fewer


def bound(names: str) -> Callable[..., Any]:
    return each(*map(bind, names.split()))


def gradient(function: Callable[..., Any], argnums: tuple[int, ...] = (0, 1)) -> Callable[..., Any]:
    def total(*args: Any) -> jax.Array:
        return jnp.asarray(sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(*args))))

    return jax.grad(total, argnums=argnums)


def conv(**params: Any) -> Callable[..., Any]:
    options: dict[str, Any] = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "padding": "SAME"}
    options |= {"window_strides": (1, 1)} | params
    return gradient(lambda x, w: lax.conv_general_dilated(x, w, **options))


def randomness(key: Any) -> Any:
    keys = jax.random.split(key, 16)
    made = jax.random.bits(key, (16,)), jax.random.wrap_key_data(jax.random.key_data(keys))
    made += (jax.random.split(jax.random.key(N[0])),)
    words = keys.shape and jnp.arange(16, dtype=jnp.uint32)
    for name, num_key_words, num_counters in RANDOM_WORDS:
        made += (bind(name)(*[words] * (num_key_words + num_counters)),)
    return made, jax.vmap(jax.random.fold_in, (0, None))(keys, 1), jax.random.gamma(key, V), jax.random.clone(keys)


def look_ups(table: jax.Array, ids: jax.Array) -> Any:
    along = jnp.take_along_axis(table, jnp.tile(ids[None], (16, 1)) % 8, axis=1)
    beyond = table.at[ids + 4].get(mode="clip"), table.at[ids + 4].get(mode="fill", fill_value=0)
    return beyond, table[ids], along, jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (4,)))(table[:8], ids % 4)


def updates(x: jax.Array, ids: jax.Array) -> Any:
    rows = x[:8] * 2
    changed = [x.at[ids + 4].set(rows), x.at[ids + 4].add(rows), x.at[ids + 4].max(rows, mode="clip")]
    changed += [getattr(x.at[ids], kind)(rows) for kind in ("set", "add", "subtract", "multiply", "min", "max")]
    repeated = jax.ops.segment_sum(x, jnp.arange(16) // 2, 8), jax.ops.segment_max(x, jnp.arange(16) // 2, 8)
    paired = jax.vmap(lambda row, i: row.at[i].add(1.0))(x[:8], ids % 8)
    written = lax.dynamic_update_slice(x, rows[:1], (ids[0], 0)), lax.dynamic_update_slice(x, rows, (ids[0], 0))
    written += (lax.dynamic_update_slice(IMAGE, IMAGE[:, :1, :, :1] * ids[0], (0, ids[1], 0, ids[2])),)
    return changed, repeated, paired, written, x.at[:, ids % 8].set(0.5), x.at[3].set(1.0)


def single_places(x: jax.Array, ids: jax.Array) -> Any:
    kinds = [getattr(x.at[ids[0]], kind)(0.5) for kind in ("set", "add", "multiply", "min", "max")]
    places = x.at[ids[:1]].set(0.5), x.at[ids[0], ids[1] % 8].add(0.5), jnp.take(x, ids[:1], axis=0), x[ids[0]]
    return kinds, places


def windows(x: jax.Array) -> Any:
    pool = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "VALID"}
    kinds = ((0.0, lax.add), (-np.inf, lax.max), (np.inf, lax.min))
    return [lax.reduce_window(x, init, op, **pool) for init, op in kinds]


def pools(x: jax.Array) -> Any:
    padded = ((0, 0), (1, 1), (0, 0), (0, 0))
    shapes: list[tuple[Any, Any, tuple[int, ...], Any]] = [
        (0.0, lax.add, (1, 3, 3, 1), "SAME"),
        (-np.inf, lax.max, (1, 3, 3, 1), "SAME"),
        (-np.inf, lax.max, (1, 3, 2, 1), padded),
        (np.inf, lax.min, (1, 2, 2, 1), "VALID"),
    ]
    return [lax.reduce_window(x, init, op, window, (1, 2, 2, 1), padding) for init, op, window, padding in shapes]


def more_windows(x: jax.Array) -> Any:
    pool: dict[str, Any] = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "VALID"}
    largest = partial(lax.reduce_window, init_value=-np.inf, computation=lax.max, **pool)
    scattered = importlib.import_module("jax._src.lax.windowed_reductions")._select_and_scatter
    back = scattered(x, lax.ge, *((1, 2, 2, 1),) * 2, ((0, 0),) * 4, x[:, ::2, ::2], jnp.float32(0), lax.add)
    return lax.reduce_window(x, 1.0, lambda a, b: a * b + a, **pool), jax.jvp(largest, (x,), (x,)), back


def reductions(x: jax.Array) -> Any:
    kinds = [reduce(x, (1,)) for reduce in (jnp.sum, jnp.max, jnp.min, jnp.prod)]
    kinds += [jnp.all(x > 0.5, 0), jnp.any(x > 0.5, 1), jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.max(x)]
    kinds += [lax.reduce_xor(lax.bitcast_convert_type(x, jnp.int32), (1,))]
    return kinds, lax.reduce(x, 0.0, lambda a, b: a + b - a * b, (0,))


def orders(x: jax.Array) -> Any:
    ranked = jnp.sort(x), jnp.argsort(x, axis=0), lax.top_k(x, 2), lax.sort((x, x), dimension=0, num_keys=1)
    scans = [scan(x, 1) for scan in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)]
    return ranked, scans, lax.approx_max_k(x, 2)


def shapes(x: jax.Array) -> Any:
    cut = lax.slice(x, (0, 0), (16, 4)), lax.dynamic_slice(x, (3, 0), (8, 8)), lax.split(x, (2, 6), axis=1)
    joined = lax.concatenate([x, x], 1), lax.stack([x, x], 1), lax.unstack(x[:, :2], axis=1), lax.tile(x, (2, 1))
    moved = lax.transpose(x, (1, 0)), lax.rev(x, (1,)), lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))), x[:, None, :]
    heads = x.reshape(16, 4, 2), x.reshape(2, 8, 8), x.reshape(-1), x.reshape(8, 16), x.reshape(16, 1, 8).squeeze(1)
    return cut, joined, moved, heads, lax.broadcast_in_dim(x, (4, 16, 8), (1, 2))


def moves(x: jax.Array) -> Any:
    kept = lax.stop_gradient(x), lax.optimization_barrier((x, x)), jax.device_put(x), jnp.array(x, copy=True)
    kept += (lax.bitcast_convert_type(x, jnp.int16), lax.reduce_precision(x, 5, 10), x.astype(jnp.bfloat16))
    kept += (checkpoint_name(x, "kept"), lax.integer_pow(x, 3))
    kept += (with_layout_constraint(x, Layout((1, 0))), set_xla_metadata(x, kept="yes"))
    anywhere = NamedSharding(
        jax.make_mesh((8,), ("any",), axis_types=(AxisType.Auto,)), jax.P(jax.P.UNCONSTRAINED, jax.P.UNCONSTRAINED)
    )
    kept += (lax.with_sharding_constraint(x, anywhere),)
    return *kept, lax.clamp(0.2, x, 0.8), lax.select(x > 0.5, x, -x), bind("add_any")(x, x)


def made(x: jax.Array) -> Any:
    state = jnp.arange(4, dtype=jnp.uint32)
    numbers = lax.rng_bit_generator(state, (16, 8)), bind("iota_2x32_shape", shape=(16, 8))()
    numbers += (lax.empty((16, 8), jnp.float32), bind("platform_index", platforms=(("cpu",), None))())
    return numbers, lax.broadcasted_iota(jnp.int32, (16, 8), 1), bind("rng_uniform", shape=(16,))(0.0, 1.0)


def decompositions(a: jax.Array) -> Any:
    solves = [lax.linalg.triangular_solve(a, a, left_side=left, lower=True) for left in (True, False)]
    solves += [lax.linalg.tridiagonal_solve(a[..., 0], a[..., 1] + 4, a[..., 2], a)]
    reflectors, taus = bind("geqrf")(a)
    solves += [lax.linalg.householder_product(reflectors, taus), lax.linalg.ormqr(reflectors, taus, a)]
    solves += [lax.linalg.symmetric_product(a, a), lax.linalg.qr(a), lax.linalg.eig(a), lax.linalg.schur(a)]
    solves += [
        lax.linalg.hessenberg(a),
        lax.linalg.tridiagonal(a),
        bind("geqp3", use_magma=None)(a, jnp.zeros((8, 4), jnp.int32)),
    ]
    solves += [lax.linalg.cholesky_update(a[0], a[0, 0])]
    solves += [lax.linalg.lu_pivots_to_permutation(jnp.zeros((8, 4), jnp.int32) + N[:8, None] % 4, 6)]
    return jnp.linalg.cholesky(a), lax.linalg.lu(a), lax.linalg.eigh(a), lax.linalg.svd(a), solves


def matrix_products(x: jax.Array, w: jax.Array) -> Any:
    batched = jnp.einsum("bij,bkj->bki", MATRICES, MATRICES)
    wide = lax.dot_general(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), (((1,), (0,)), ((), ())),
                           preferred_element_type=jnp.float32)  # fmt: skip
    return x @ w, batched, wide


def grouped_products(x: jax.Array, w: jax.Array) -> Any:
    return lax.ragged_dot(x, w, jnp.array([4, 12]))


def attention_over_pages(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    tables, positions = jnp.arange(16, dtype=jnp.int32)[::-1].reshape(8, 2), jnp.asarray(N).reshape(8, 2) % 8
    return attend_paged("blocks", queries, KVPages(keys, values), tables, positions)


#: What jaxlib 0.12.0.1 compiles for one device alone: `mulhi`, which philox is made of.
ONE_DEVICE_ONLY = {"mulhi", "philox2x32", "philox4x32"}
#: Programs whose equations are forced; small, but with dims that 8 and 2x4 divide.
SAMPLES: dict[str, Sample] = {
    "floats": (named("abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp"
                     " exp2 expm1 floor is_finite lgamma log log1p log2 logistic neg one_minus_square round rsqrt sign sin"
                     " sinh sqrt square tan tanh"), [V]),
    "more_floats": (each(lambda v: lax.acosh(v + 1), lambda v: lax.polynomial(v, [1.0, 2.0, 3.0])), [V]),
    "pairs": (named("add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub igamma igammac zeta"), [V, V + 1.5]),
    "special": (each(lambda a, b: lax.betainc(a, b, a), lambda a, b: lax.polygamma(1.0, b),
                     gradient(lax.igamma)), [V, V + 1.5]),
    "integers": (named("bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical mulhi"), [N, N]),
    "bits": (named("bitwise_not population_count clz"), [N]),
    "complexes": (each(lambda a: lax.real(lax.complex(a, a)), lambda a: lax.imag(lax.conj(lax.complex(a, -a)))), [V]),
    "total_orders": (bound("eq_to le_to lt_to"), [V, V[::-1].copy()]),
    "moves": (moves, [X]),
    "made": (made, [X]),
    "randomness": (randomness, [jax.random.key(0)]),
    "reductions": (reductions, [WIDE]),
    "orders": (orders, [WIDE]),
    "shapes": (shapes, [X]),
    "look_ups": (gradient(look_ups, (0,)), [X, IDS]),
    "updates": (updates, [X, IDS]),
    "single_places": (gradient(single_places, (0,)), [X, IDS]),
    "windows": (gradient(windows, (0,)), [IMAGE]),
    "more_windows": (more_windows, [IMAGE]),
    "matrix_products": (gradient(matrix_products), [X, RNG.random((8, 16), np.float32)]),
    "grouped_products": (gradient(grouped_products), [X, RNG.random((2, 8, 16), np.float32)]),
    "attention_over_pages": (attention_over_pages, [RNG.random((8, 2, 16, 4), np.float32), *RNG.random((2, 17, 4, 8, 4), np.float32)]),
    "conv": (conv(), [IMAGE, KERNEL]),
    "conv_strided": (conv(window_strides=(2, 2)), [IMAGE, KERNEL]),
    "conv_dilated": (conv(rhs_dilation=(2, 2)), [IMAGE, KERNEL]),
    "conv_spatial": (conv(), [RNG.random((2, 16, 16, 4), np.float32), RNG.random((3, 5, 4, 4), np.float32)]),
    "conv_spatial_strided": (conv(window_strides=(2, 2)), [RNG.random((2, 16, 32, 2), np.float32), RNG.random((7, 3, 2, 4), np.float32)]),
    "conv_spatial_dilated": (conv(rhs_dilation=(2, 3), padding=((2, 2), (3, 3))),
                             [RNG.random((2, 32, 32, 2), np.float32), RNG.random((3, 3, 2, 4), np.float32)]),
    "conv_spatial_odd": (conv(padding="VALID", window_strides=(1, 3)),
                         [RNG.random((2, 18, 26, 2), np.float32), RNG.random((3, 5, 2, 4), np.float32)]),
    "conv_spatial_grouped": (conv(feature_group_count=2), [RNG.random((2, 16, 8, 4), np.float32), RNG.random((3, 3, 2, 8), np.float32)]),
    "conv_spatial_depthwise": (conv(feature_group_count=8, window_strides=(2, 1)),
                               [RNG.random((2, 16, 8, 8), np.float32), RNG.random((3, 3, 1, 8), np.float32)]),
    "conv_patches": (conv(padding="VALID", window_strides=(4, 4)), [RNG.random((2, 32, 8, 2), np.float32), RNG.random((4, 4, 2, 8), np.float32)]),
    "pools": (gradient(pools, (0,)), [RNG.permutation(2 * 16 * 32 * 2).reshape(2, 16, 32, 2).astype(np.float32) / 2048]),
    "conv_depthwise": (conv(feature_group_count=8), [IMAGE, KERNEL[:, :, :1]]),
    "conv_grouped": (conv(feature_group_count=2), [IMAGE, KERNEL[:, :, :4]]),
    "fourier": (each(lambda a: jnp.fft.fft(a, axis=2), jnp.fft.rfft2), [MATRICES]),
    "decompositions": (decompositions, [MATRICES]),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One equation of a sample with its rule."""

    position: int
    equation: Equation
    view: NodeView
    rule: Rule

    def strategies(self, mesh: str) -> list[Strategy]:
        """As the planner lists them: the minor factors of a compound dim are not split. The first, replicated one is
        what the others are held against."""
        compound = [dim for term in (*self.rule.operands, *self.rule.results) for dim in term if len(dim) > 1]
        even = {f for dim in compound for f in dim} | {f for f, one in enumerate(self.rule.factors) if one.even}
        fixed = {f for dim in compound for f in dim[1:]}
        windows: dict[int, list[Window]] = defaultdict(list)
        for halo in self.rule.halos:
            windows[halo.factor].append(halo.window)
        options: dict[str, Any] = {"even": even, "fixed": fixed, "manual": self.rule.manual, "windows": windows}
        return list(enumerate_strategies(self.rule.factors, parse_mesh(mesh), **options))[1:]

    def strips(self, strategy: Strategy, shape: MeshShape) -> list[tuple[tuple[str, ...], int]]:
        """Of each strip that neighbours send each other, the axes it moves along and its elements."""
        found: list[tuple[tuple[str, ...], int]] = []
        for operand in range(len(self.rule.operands)):
            dims = self.rule.operands[operand]
            local = list(strategy.sharding(dims).local_shape(self.view.operand_shapes[operand], shape))
            for halo in self.rule.halos:
                axes = strategy.axes[halo.factor]
                if halo.operand == operand and axes:
                    window = halo.window.local(shape.sizes(axes))
                    assert window is not None
                    others = math.prod(local) // local[halo.dim]
                    found += [(axes, others * width) for width in (window.low, window.high) if width]
                    local[halo.dim] = window.length
        return found

    def words(self, strategy: Strategy) -> str:
        return f"{self.view.primitive} {self.rule.operands} -> {self.rule.results} under {strategy.axes}"

    def is_summed(self, strategy: Strategy) -> bool:
        return any(f.reduction and axes for f, axes in zip(self.rule.factors, strategy.axes, strict=True))

    def sends(self, strategy: Strategy) -> bool:
        """Whether the node gathers by itself."""
        return any(strategy.axes[one.factor] for one in self.rule.exchanges)

    def region(self, strategy: Strategy) -> ManualRegion | None:
        """How it is run in parts, if it is."""
        if not any(strategy.axes[f] for f in self.rule.manual):
            return None
        pending = [i for i, f in enumerate(self.rule.factors) if f.reduction]
        kinds: list[Reduction] = [f.reduction for f in self.rule.factors if f.reduction]
        return ManualRegion(
            node=self.position,
            primitive=self.view.primitive,
            path="",
            operands=tuple(strategy.sharding(dims) for dims in self.rule.operands),
            results=tuple(strategy.sharding(dims, pending) for dims in self.rule.results),
            reduction=kinds[0] if kinds else "sum",
        )


def cases(sample: str) -> Iterator[Case]:
    """Equations that differ in more than their place."""
    function, args = SAMPLES[sample]
    traced = trace(function, args)
    graph = graph_of(traced, ())
    seen: set[str] = set()
    for n, (equation, node) in enumerate(zip(traced.equations, graph.nodes, strict=True)):
        view = NodeView.of(node, graph)
        rule = rule_for(view)
        key = repr((view, [traced.avals[v] for v in equation.operands if not isinstance(v, LiteralOperand)]))
        if rule is not None and key not in seen:
            seen.add(key)
            yield Case(n, equation, view, rule)


def raw(value: Any) -> Any:
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


class Forced:
    """All strategies of a sample's equations on one mesh, as one program."""

    def __init__(self, sample: str, mesh: str, without: Collection[str] = ONE_DEVICE_ONLY) -> None:
        self.cases = [case for case in cases(sample) if case.view.primitive not in without]
        function, args = SAMPLES[sample]
        self.traced = trace(function, args)
        self.args = args
        shape = parse_mesh(mesh)
        types = (AxisType.Auto,) * len(shape.axis_names)
        self.mesh: Any = jax.make_mesh(shape.axis_sizes, shape.axis_names, axis_types=types)
        self.strategies = [case.strategies(mesh) for case in self.cases]

    @property
    def zero(self) -> np.ndarray:
        """One for each case and strategy."""
        return np.zeros((len(self.cases), max(map(len, self.strategies), default=0)), np.float32)

    def programs(self) -> Iterator[tuple[int, int]]:
        """Positions of a case and of a strategy."""
        return ((c, s) for c, strategies in enumerate(self.strategies) for s in range(len(strategies)))

    def unsharded(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Every value of the sample's program."""
        env: dict[int, Any] = dict(zip(self.traced.inputs, leaves, strict=True)) | dict(self.traced.constants)
        for equation in self.traced.equations:
            if equation.primitive in ONE_DEVICE_ONLY:
                continue
            operands = [v.value if isinstance(v, LiteralOperand) else env[v] for v in equation.operands]
            env.update(zip(equation.results, jax_compat.bind(equation.source, operands), strict=True))
        return env

    def _constrain(self, value: Any, sharding: Any) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, partition_spec(sharding)))

    def forced(self, env: dict[int, Any], zero: jax.Array) -> list[list[list[Any]]]:
        """Results by case, strategy and result. The operands of regions are all made different, or else XLA would send
        each of the strips that several strategies share once."""
        out: list[list[list[Any]]] = []
        for c, (case, strategies) in enumerate(zip(self.cases, self.strategies, strict=True)):
            out.append([])
            for s, strategy in enumerate(strategies):
                with jax.named_scope(f"case{c}_{s}_"):
                    operands = [
                        v.value if isinstance(v, LiteralOperand) else self._constrain(env[v], strategy.sharding(dims))
                        for v, dims in zip(case.equation.operands, case.rule.operands, strict=True)
                    ]
                    region = case.region(strategy)
                    if region is not None and case.rule.halos:
                        operands = [
                            self._constrain(v + zero[c, s], p) for v, p in zip(operands, region.operands, strict=True)
                        ]
                    if region is None:
                        results = jax_compat.bind(case.equation.source, operands)
                    else:
                        targets = [None] * len(region.results)
                        results = run_region(region, case.equation.source, operands, self.mesh, targets)
                    pairs = zip(results, case.rule.results, strict=True)
                    out[-1].append([raw(self._constrain(v, strategy.sharding(dims))) for v, dims in pairs])
        return out


@pytest.mark.sampled(24)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_strategy_computes_the_same_without_hidden_collectives(sample: str, mesh: str) -> None:
    forced = Forced(sample, mesh)
    everywhere = NamedSharding(forced.mesh, jax.P())
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    plain = jax.jit(forced.unsharded, in_shardings=everywhere, out_shardings=everywhere)
    whole = plain.lower(jax.tree.leaves(forced.args)).compile(options)(jax.tree.leaves(forced.args))
    zero = forced.zero
    compiled = jax.jit(forced.forced, in_shardings=everywhere).lower(whole, zero).compile(options)
    results = compiled(whole, zero)
    wrong: list[str] = []
    for c, s in forced.programs():
        case, strategy = forced.cases[c], forced.strategies[c][s]
        for got, position in zip(results[c][s], case.equation.results, strict=True):
            expected = np.asarray(raw(whole[position]), np.complex64)
            if not np.allclose(np.asarray(got, np.complex64), expected, rtol=1e-3, atol=1e-4, equal_nan=True):
                wrong.append(f"{case.words(strategy)}: other values than unsharded")
    permuted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for one in hlo.collectives(compiled.as_text() or "", ignore_up_to=1):  # 1: whether a loop has ended
        place = re.search(r"case(\d+)_(\d+)_", one.op_name)
        if place is None:
            wrong.append(f"{one.kind} of nobody: {one.op_name}")
            continue
        case, strategy = forced.cases[int(place[1])], forced.strategies[int(place[1])][int(place[2])]
        if one.kind == "collective-permute" and case.rule.halos:
            permuted[int(place[1]), int(place[2])].append(one.num_elements)
            continue
        if one.kind == "all-gather" and case.sends(strategy):
            continue
        if one.kind != "all-reduce" or not case.is_summed(strategy):
            wrong.append(f"{case.words(strategy)}: {one.kind} of {one.num_elements} elements")
    for c, s in forced.programs():
        case, strategy = forced.cases[c], forced.strategies[c][s]
        wanted = [elements for _, elements in case.strips(strategy, parse_mesh(mesh))]
        if sorted(permuted[c, s]) != sorted(wanted):
            wrong.append(f"{case.words(strategy)}: permutes of {permuted[c, s]} elements, not of {wanted}")
    assert not wrong, "\n".join(wrong)


def test_every_primitive_of_the_table_has_a_sample() -> None:
    found = {case.view.primitive for sample in SAMPLES for case in cases(sample)}
    # Pieces of loops are nothing by themselves: `test_structure` forces them, in whole programs. A `reshard` is of a mesh
    # with explicit axes; the replay drops it.
    assert set(RULES) - found == {*BORDERS, "shard_map", "reshard"} - {"barrier"}
