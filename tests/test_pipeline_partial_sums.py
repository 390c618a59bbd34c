"""A gradient is reduced over the devices of a stage once per step, not in each microbatch."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_step import BATCH, LAYERS, WIDTH, arguments, step
from pipelines import pipelined

import autopar
from autopar.pipeline.run.abstract_run import PieceRuns
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.instructions import Call
from autopar.xla_compiler.compiler import Compiler

WIDE = 128  # a vector of so many elements is planned
_COLLECTIVE = re.compile(r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def large_collectives(pipeline: Pipeline) -> dict[str, int]:
    """By piece, how many collectives of matrices its compiled program has."""
    values = pipeline.begin(jax.tree.leaves(arguments()))
    found: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for one in pipeline.instructions.steps:
        if isinstance(one, Call) and id(one.program) not in seen:
            seen.add(id(one.program))
            assert one.program.jitted is not None
            lowered: Any = one.program.jitted
            text = lowered.lower(*(values[i] for i in one.reads)).compile().as_text()
            found[one.program.piece.name.split()[0]] += sum(
                f"{WIDTH},{WIDTH}]" in of for of in _COLLECTIVE.findall(text)
            )
        one.run(values)
    return found


@pytest.mark.contract
def test_examples_split_over_devices() -> None:
    run, pipeline = pipelined(step, arguments(), num_stages=2, num_microbatches=4, mesh="4")
    state, loss = run(*arguments())
    plain, expected = jax.jit(step)(*arguments())
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    found = large_collectives(pipeline)
    assert found["backward"] == found["forward"] == 0
    assert found["after"] > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_examples_and_parameters_split(schedule: str) -> None:
    """Sums over one axis wait; what the other splits stays split."""
    run, pipeline = pipelined(
        step, arguments(), num_stages=2, num_microbatches=4, mesh="data=2,model=2", schedule=schedule
    )
    state, _ = run(*arguments())
    plain, _ = jax.jit(step)(*arguments())
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert any(stage.partial for stage in pipeline.pieces)


def normalized(params: list[Any], batch: jax.Array) -> tuple[list[Any], jax.Array]:
    """A step whose gradients of scales are sums of products that no plan constrains: they are inside a group."""

    def loss(params: list[Any]) -> jax.Array:
        x = batch
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"])
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-2) * layer["scale"]
        return jnp.mean((x - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def normalized_arguments(width: int = WIDE, batch: int = BATCH) -> tuple[list[Any], jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [{"kernel": jax.random.normal(key, (width, width)) / 8, "scale": jnp.ones(width)} for key in keys[1:]]
    return params, jax.random.normal(keys[0], (batch, width))


def test_sums_inside_a_group_wait_as_they_are_priced() -> None:
    args = normalized_arguments()
    run, pipeline = pipelined(normalized, args, num_stages=2, num_microbatches=4, mesh="4", option=0)
    state, loss = run(*args)
    plain, expected = jax.jit(normalized)(*args)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for stage in pipeline.pieces:
        shapes = [stage.layout.trace.avals[carry].shape for carry in stage.partial]
        assert sorted(filter(None, shapes)) == [(WIDE,)] * 2 + [(WIDE, WIDE)] * 2  # all gradients


def _reduced(piece: PieceRuns) -> list[float]:
    """Bytes of the all-reduces of a piece."""
    found = (one for link in piece.links for one in link.compiled.collectives if one.kind == "all-reduce")
    return [one.num_bytes for one in found]


@pytest.mark.usefixtures("gpu_compiler")
def test_each_microbatch_reduces_as_often_as_predicted(absent_gpus: Compiler) -> None:
    args = jax.eval_shape(lambda: normalized_arguments(512, 8192))
    plan: Any = autopar.plan(
        normalized, *args, hardware="h100-sxm", num_devices=8, stages=2, num_microbatches=4, schedule="1f1b", mesh="4"
    )
    found: Any = autopar.verify(normalized, *args, plan=plan, hardware="h100-sxm", compiler=absent_gpus)
    assert not [name for stage in found.stages for name in stage.off]
    in_loop = [one for stage in found.stages for piece in stage.pieces for one in _reduced(piece) if piece.count == 4]
    assert not in_loop


def convolved(params: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """A kernel of a convolution, whose gradient is reduced in each microbatch, and a matrix of the same size."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        x = batch
        for n in range(2):
            x = jax.nn.relu(jax.lax.conv(x, params[f"kernel{n}"], (1, 1), "SAME"))
            x = jnp.tanh(jnp.einsum("ncij,cd->ndij", x, params[f"matrix{n}"]))
        return jnp.mean((x - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_reductions_of_one_size_are_listed_as_each_runs(absent_gpus: Compiler) -> None:
    shapes = {f"kernel{n}": (128, 128, 1, 1) for n in range(2)} | {f"matrix{n}": (128, 128) for n in range(2)}
    args = (
        {name: jax.ShapeDtypeStruct(one, "float32") for name, one in shapes.items()},
        jax.ShapeDtypeStruct((256, 128, 16, 16), "float32"),
    )
    options: dict[str, Any] = {"num_devices": 4, "stages": 2, "num_microbatches": 4, "schedule": "1f1b", "mesh": "2"}
    plan: Any = autopar.plan(convolved, *args, hardware="h100-sxm", **options)
    found: Any = autopar.verify(convolved, *args, plan=plan, hardware="h100-sxm", compiler=absent_gpus)
    for stage in found.stages:
        assert {one.num_times for one in stage.plan.collectives} >= {1, 4}
        assert not [name for name in stage.off if "reduce" in name]
