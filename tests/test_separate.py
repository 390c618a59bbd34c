"""Reductions in kernels of their own: which, XLA's program and its estimate, and unchanged results."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.hardware.profile import load
from autopar.jax_interop.compilation import module_bytes
from autopar.plans.plan import Plan
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
from autopar.runtime.xla_options import compiler_options
from autopar.transforms.program import Program, program_of
from autopar.xla_compiler.compiler import Compiler
from tests.planned import plan_and_candidate

H100 = load("h100-sxm")
NUM_LAYERS = 3
State = dict[str, jax.Array]


def normed(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = (wide * wide).mean(-1, keepdims=True) - mean * mean
    return ((wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * scale) + bias).astype(x.dtype)


def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """Norms after residuals, as in BERT: each one's bias sums what the layer below multiplies with a mask."""

    def loss(state: State) -> jax.Array:
        h = x
        for n in range(NUM_LAYERS):
            out = h @ state[f"w{n}"].astype(h.dtype)
            h = normed(h + out * (out > -1.0), state[f"scale{n}"], state[f"bias{n}"])
        return (h.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def arguments(width: int, batch: int, length: int = 64) -> tuple[State, jax.Array]:
    rng = np.random.default_rng(0)
    state = {}
    for n in range(NUM_LAYERS):
        state[f"w{n}"] = jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32)
        state |= {f"scale{n}": jnp.ones(width), f"bias{n}": jnp.zeros(width)}
    return state, jnp.asarray(rng.normal(size=(batch, length, width)), jnp.bfloat16)


@cache
def made(width: int = 768, batch: int = 512, mesh: str = "8") -> tuple[Program, Plan]:
    program = program_of(step, jax.eval_shape(lambda: arguments(width, batch)), carry=None, donate=None)
    plan, _ = plan_and_candidate(
        program.as_traced.in_microbatches(1), mesh=mesh, hardware=H100, pin={"x": PartitionSpec("data")}
    )
    return program, plan


def test_sums_down_columns_get_kernels_of_their_own() -> None:
    program, plan = made()
    graph = program.as_traced.graph
    assert len(plan.unfused_reductions) >= NUM_LAYERS - 1
    for one in plan.unfused_reductions:
        read = {value for n in one.nodes for value in graph.nodes[n].operands}
        sums = [n for n in one.nodes if read.isdisjoint(graph.nodes[n].results)]
        assert [graph.nodes[n].primitive for n in sums] == ["reduce_sum"] * len(sums)
        assert one.nodes[-1] in sums
        assert list(one.nodes) == sorted(one.nodes)
        assert one.at


def test_a_device_with_as_many_blocks_as_it_likes_needs_none() -> None:
    """What XLA joins costs nothing where few thread blocks are as fast as many."""
    program = made()[0]
    estimator = replace(H100.xla_estimator, block_bytes_per_s=math.inf, num_cores=1)  # type: ignore[type-var]
    plan, _ = plan_and_candidate(
        program.as_traced.in_microbatches(1), mesh="8", hardware=replace(H100, xla_estimator=estimator)
    )
    assert not plan.unfused_reductions


@pytest.mark.slow
def test_xla_keeps_them_apart_and_finds_the_step_faster(absent_gpus: Compiler) -> None:
    """As predicted: XLA's estimate of its own program, with them and without."""
    program, plan = made()
    args = jax.eval_shape(lambda: arguments(768, 512))

    def seconds(plan: Plan) -> float:
        jitted = jit_plan(plan, program.of(plan).trace, abstract_mesh(plan.mesh))
        lowered = module_bytes(lower_for("cuda", jitted, args))
        told = absent_gpus.compile(lowered, H100, 8, 1, options=compiler_options(plan)).step_time_s
        assert told is not None
        return told

    apart = seconds(plan)
    assert apart < 0.9 * seconds(replace(plan, unfused_reductions=()))
    assert plan.prediction.xla_step_time_s == pytest.approx(apart, rel=0.15)


@pytest.mark.slow
def test_numbers_are_those_of_plain_jax(tmp_path: Path) -> None:
    """On one process's CPU devices, from the plan and from its file."""
    args = arguments(768, 512, length=8)
    parallel = autopar.parallelize(step, mesh="8", hardware=H100, pin={"x": PartitionSpec("data")}, cache=False)
    plan = parallel.plan(*args)
    assert plan.unfused_reductions
    path = tmp_path / "plan.json"
    plan.save(path)
    read = autopar.load_plan(path)
    assert isinstance(read, Plan)
    assert read.unfused_reductions == plan.unfused_reductions
    want = jax.tree.map(np.asarray, jax.jit(step)(*args))
    again = autopar.parallelize(step, plan=read, cache=False)
    for run in (parallel, again):
        got: Any = run(*jax.tree.map(jnp.copy, args))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=2e-2, atol=2e-3), got, want)
