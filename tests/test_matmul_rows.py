"""The order of matmuls' operands and results in memory, and the alignment of their rows, beside XLA's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from on_absent_gpus import compiled

import autopar
from autopar.cost.kernel_time import gemm_seconds
from autopar.cost.matmul_rows import Matmul, after_moving, lost_rows, moved_dim, row_alignment, summed
from autopar.hardware.profile import load
from autopar.ir.device_program import Gemm
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.strategies import Strategy
from autopar.transforms.program import program_of
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.hlo_text import parse_module
from autopar.xla_replay.library_calls import dot_gemm
from tests.test_on_device import built

VOCABULARY, WIDTH, TOKENS = 2049, 512, 16384


def _step(state: Any, tokens: Any) -> Any:
    """A step whose head is the table, transposed."""

    def loss(table: Any) -> Any:
        x = jnp.take(table.astype(jnp.bfloat16), tokens, axis=0)
        logits = jax.nn.gelu(x) @ table.T.astype(jnp.bfloat16)
        return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


ARGS = (jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32), jax.ShapeDtypeStruct((TOKENS,), jnp.int32))


@pytest.mark.parametrize("table", [P(), P(None, "data")], ids=["replicated", "split"])
def test_rows_are_aligned_where_xlas_are(table: P, absent_gpus: Compiler) -> None:
    options: dict[str, Any] = {"hardware": "h100-sxm", "pin": {"state": table, "tokens": P("data")}}
    plan, program = autopar.parallelize(_step, mesh="8", cache=False, **options).planned(*ARGS)
    module = parse_module(compiled(absent_gpus, plan, program, *ARGS).hlo_text)
    by_xla = Counter(
        _alignment(*dot_gemm(computation, one).aligned_bytes)
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode == "dot"
    )
    predicted = Counter(
        _alignment(*op.gemm.aligned_bytes) for op in built(_step, *ARGS, mesh="8", pin=options["pin"]).ops if op.gemm
    )
    assert predicted == by_xla
    assert len(by_xla) > 1


def test_a_split_vocabulary_has_aligned_rows() -> None:
    """BART's vocabulary of 50,265 loads slowly as a whole. Eight parts of 6,284 are aligned to 8 bytes, which is worth the
    tokens' all-gather; eight parts of 4,095 are worth less."""
    args = (jax.ShapeDtypeStruct((50265, 768), jnp.float32), jax.ShapeDtypeStruct((65536,), jnp.int32))
    found = built(_step, *args, mesh="8", pin={"tokens": P("data")})
    assert {min(op.gemm.aligned_bytes) for op in found.ops if op.gemm} == {8}
    small = (jax.ShapeDtypeStruct((4095, 512), jnp.float32), ARGS[1])
    found = built(_step, *small, mesh="8", pin={"tokens": P("data")})
    assert {min(op.gemm.aligned_bytes) for op in found.ops if op.gemm} == {2}


@pytest.mark.parametrize(("tokens", "vocabulary", "slower"), [("", "", True), ("data", "", True), ("", "data", False)])
def test_parts_of_a_matmul_are_priced_by_their_own_rows(tokens: str, vocabulary: str, slower: bool) -> None:
    sizes, profile = (16384, 512, 2041), load("h100-sxm")
    dims = (((0,), (1,)), ((1,), (2,)), ((0,), (2,)))
    shapes = tuple(tuple(sizes[f] for (f,) in of) for of in dims)
    head = Matmul((((1,), (0,)), ((), ())), shapes, ("bfloat16",) * 3, dims, ((0, 1),) * 3, 1.0)
    strategy = Strategy(tuple((axis,) if axis else () for axis in (tokens, "", vocabulary)))
    mesh = MeshShape(("data",), (8,))
    lost = head.lost_s(strategy, mesh, profile)
    m, k, n = (-(-size // (8 if axes else 1)) for size, axes in zip(sizes, strategy.axes, strict=True))
    aligned = (16, 2, 2) if slower else (16, 16, 16)
    priced = [gemm_seconds(Gemm(1, m, n, k, "bfloat16", "bfloat16", one), profile) for one in (aligned, (16, 16, 16))]
    assert lost == priced[0] - priced[1]
    assert (lost > 0) == slower


def _alignment(left: int, right: int, out: int) -> tuple[int, int, int]:
    """XLA swaps the operands of a matmul as it likes."""
    return min(left, right), max(left, right), out


def test_the_plan_keeps_rows_aligned() -> None:
    """No head reads a table that was gathered with the vocabulary as the innermost dim."""
    pin = {"tokens": P("data")}
    free = built(_step, *ARGS, mesh="8", pin=pin)
    whole = built(_step, *ARGS, mesh="8", pin=pin | {"state": P()})
    assert [op.gemm for op in free.ops if op.gemm] == [op.gemm for op in whole.ops if op.gemm]


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ((("data",), ()), ((), ()), 1.0),
        (((), ("data",)), ((), ()), 2.0),
        ((("data",), ("model",)), ((), ()), 1.0),
        (((), ("data",)), (("data",), ()), 0.0),
        (((), ()), ((), ("data",)), 0.0),
    ],
)
def test_the_dim_gathered_last_is_the_outermost(before: Any, after: Any, lost: float) -> None:
    assert lost_rows(TensorSharding(before), TensorSharding(after), (1.0, 2.0), (0.0, 0.0)) == lost


def test_a_scattered_result_has_its_dim_outermost() -> None:
    before, after = TensorSharding(((), ()), ("data",)), TensorSharding(((), ("data",)))
    assert lost_rows(before, after, (1.0, 2.0), (4.0, 8.0)) == 8.0
    assert moved_dim(before, after) == 1
    assert after_moving((0, 1), 1) == (1, 0)


@pytest.mark.parametrize(("order", "aligned"), [((0, 1), 2), ((1, 0), 16)])
def test_rows_have_the_size_of_the_innermost_dim(order: tuple[int, ...], aligned: int) -> None:
    assert row_alignment((768, 50257), order, "bfloat16") == aligned
    assert row_alignment((1, 50257), (0, 1), "bfloat16") == 16, "a single row starts where the tensor does"


POSITIONS = 197


def _with_positions(params: Any, patches: Any) -> Any:
    """A step that adds a table of positions to patches of images, which then attend to each other."""

    def loss(params: Any) -> Any:
        x = (patches + params["positions"][None]).astype(jnp.bfloat16)
        for layer in params["layers"]:
            weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x) / WIDTH)
            x = x + jax.nn.gelu(jnp.einsum("bqk,bkd->bqd", weights, x) @ layer.astype(jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda one, gradient: one - 0.1 * jnp.tanh(gradient), params, gradients), value


def _images(batch: int) -> tuple[Any, Any]:
    layers = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    params = {"positions": jax.ShapeDtypeStruct((POSITIONS, WIDTH), jnp.float32), "layers": layers}
    return params, jax.ShapeDtypeStruct((batch, POSITIONS, WIDTH), jnp.float32)


@pytest.mark.parametrize(("table", "is_aligned"), [(P(None, "data"), False), (None, True)], ids=["split", "planned"])
def test_one_example_per_device_keeps_its_rows_aligned(
    table: P | None, is_aligned: bool, absent_gpus: Compiler
) -> None:
    """The gradient of a table of positions is then the gradient of the activations. If its features are scattered, XLA stores all
    activations by features, in rows of 197 positions."""
    pin = {"patches": P("data")} | ({"params/positions": table} if table else {})
    args = _images(8)
    plan, program = autopar.parallelize(_with_positions, mesh="8", cache=False, hardware="h100-sxm", pin=pin).planned(
        *args
    )
    module = parse_module(compiled(absent_gpus, plan, program, *args).hlo_text)
    gemms = [
        dot_gemm(computation, one)
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode == "dot"
    ]
    wide = [gemm for gemm in gemms if WIDTH in (gemm.m, gemm.n)]
    assert wide
    assert all(gemm.aligned_bytes[2] == 16 for gemm in wide) == is_aligned


@pytest.mark.parametrize(("batch", "loses"), [(8, True), (16, False)])
def test_only_a_sum_of_one_term_per_device_has_a_price(batch: int, loses: bool) -> None:
    graph = program_of(_with_positions, _images(batch), carry=None, donate=None).graph
    mesh, profile = MeshShape(("data",), (8,)), load("h100-sxm")
    reduced = [
        n for n in graph.nodes if n.primitive == "reduce_sum" and graph.values[n.results[0]].shape == (POSITIONS, WIDTH)
    ]
    sums = [summed(graph, node.results[0], mesh, profile) for node in reduced]
    (found,) = (one for one in sums if one.num_terms == batch)
    assert found.lost_s[0] == 0.0 < found.lost_s[1]
    before, after = TensorSharding(((), ()), ("data",)), TensorSharding(((), ("data",)))
    lost = lost_rows(before, after, (0.0, 0.0), (0.0, 0.0), found.by_dim(mesh.sizes(before.unreduced)))
    assert (lost > 0.0) == loses
