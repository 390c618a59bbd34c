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
from autopar.cost.matmul_rows import after_moving, lost_rows, moved_dim, row_alignment
from autopar.ir.sharding import TensorSharding
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
