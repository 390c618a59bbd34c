"""Matmuls that share an operand become one, as XLA's compiler for an absent H100 makes of them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from on_absent_gpus import compiled
from planned import plan_and_candidate

from autopar.ir.device_program import Gemm
from autopar.transforms.program import program_of
from autopar.xla_compiler.compiler import Compiler

pytestmark = pytest.mark.contract

BFLOAT16 = jnp.bfloat16


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, BFLOAT16)


def products(x: jax.Array, ws: dict[str, jax.Array]) -> list[jax.Array]:
    return [x @ w for w in ws.values()]


def gated(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    return jax.nn.silu(x @ ws["a"]) * (x @ ws["b"])


def chained(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    """The second product needs the first, so they cannot be one."""
    return x @ (ws["b"] + jnp.max(x @ ws["a"]))


def gradients(x: jax.Array, ws: dict[str, jax.Array]) -> Any:
    return jax.grad(lambda w: jnp.sum(gated(x, w).astype(jnp.float32)))(ws)


def predicted(step: Any, *args: Any) -> list[Gemm]:
    """The matmuls of the predicted program."""
    program = program_of(step, args, carry=None, donate=None)
    made = plan_and_candidate(program, mesh="1", hardware="h100-sxm")[1]
    ops = made.parts.simulation.program.ops
    return sorted((op.gemm for op in ops if op.kind == "gemm" and op.gemm), key=lambda one: (one.m, one.n))


def compiled_sizes(compiler: Compiler, step: Any, *args: Any) -> list[int]:
    """Elements of the result of each matmul that XLA compiles, in order."""
    program = program_of(step, args, carry=None, donate=None)
    plan, _ = plan_and_candidate(program, mesh="1", hardware="h100-sxm")
    text = compiled(compiler, plan, program, *args).hlo_text
    shapes = re.findall(r"%gemm_fusion\S* = \w+\[([\d,]+)\]\S* fusion", text)
    return sorted(int(jnp.prod(jnp.array(list(map(int, shape.split(",")))))) for shape in shapes)


#: Rows, contracted dim and columns of the matmuls, and how many are left. Releases before 0.11 agree on these.
PAIRS = [
    ((4096, 1536, (1024, 8192)), 1),
    ((4096, 1536, (1536, 384, 384)), 1),
    ((2048, 1024, (1024, 1024)), 1),
    ((4096, 1536, (6144, 6144)), 2),
    ((8192, 2048, (4096, 4096)), 2),
]


@pytest.mark.parametrize(("sizes", "left"), PAIRS, ids=[str(sizes) for sizes, _ in PAIRS])
def test_matmuls_of_one_operand_are_merged_up_to_a_size(
    sizes: tuple[int, int, tuple[int, ...]], left: int, absent_gpus: Compiler
) -> None:
    rows, inner, columns = sizes
    args = array(rows, inner), {str(i): array(inner, n) for i, n in enumerate(columns)}
    assert len(predicted(products, *args)) == left
    assert len(compiled_sizes(absent_gpus, products, *args)) == left


@pytest.mark.parametrize(("step", "left"), [(gated, 1), (chained, 2), (gradients, 2)])
def test_only_independent_matmuls_with_equal_contractions_are_merged(
    step: Any, left: int, absent_gpus: Compiler
) -> None:
    args = array(1024, 1024), {"a": array(1024, 1024), "b": array(1024, 1024)}  # squares: only the dims tell them apart
    found = predicted(step, *args)
    assert len(found) == left
    assert [one.m * one.n for one in found] == compiled_sizes(absent_gpus, step, *args)


def test_a_result_far_narrower_than_the_others_is_a_matmul_of_its_own() -> None:
    args = array(4096, 1536), {"a": array(1536, 3072), "b": array(1536, 128)}
    assert [one.n for one in predicted(products, *args)] == [128, 3072]


def test_slices_of_a_merged_result_are_separate_kernels() -> None:
    program = program_of(
        products, (array(512, 512), {"a": array(512, 512), "b": array(512, 512)}), carry=None, donate=None
    )
    ops = plan_and_candidate(program, mesh="1", hardware="h100-sxm")[1].parts.simulation.program.ops
    assert [op.kind for op in ops] == ["gemm", "fusion", "fusion"]
