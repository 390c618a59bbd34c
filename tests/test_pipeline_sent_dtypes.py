"""Pieces send the dtype that is priced: parameters that are cast before they are gathered, sums in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pipelines import pipelined

import autopar
from autopar.xla_compiler.compiler import Compiler

WIDTH, BATCH = 512, 4096
OPTIONS: dict[str, Any] = {
    "hardware": "h100-sxm",
    "num_devices": 8,
    "stages": 2,
    "num_microbatches": 4,
    "schedule": "1f1b",
}


def step(params: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Layers in bfloat16 with float32 parameters; every second one reads its kernel transposed."""

    def loss(params: list[jax.Array]) -> jax.Array:
        x = batch.astype(jnp.bfloat16)
        for n, kernel in enumerate(params):
            x = jnp.tanh(x @ (kernel.T if n % 2 else kernel).astype(jnp.bfloat16))
        return jnp.mean((x.astype(jnp.float32) - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(num_layers: int = 4) -> Any:
    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return [shape] * num_layers, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(("mesh", "pin"), [("data=2,model=2", P(("data", "model"))), ("4", P("data"))])
def test_casts_come_before_gathers_and_sums_are_wide(mesh: str, pin: P, absent_gpus: Compiler) -> None:
    args = arguments()
    plan: Any = autopar.plan(step, *args, mesh=mesh, pin={"params/*": pin}, **OPTIONS)
    uses = [use for stage in plan.stages for use in stage.plan.collectives if use.num_times == 1]
    sizes = {kind: {use.num_bytes for use in uses if use.kind == kind} for kind in ("all-gather", "reduce-scatter")}
    assert sizes == {"all-gather": {2.0 * WIDTH * WIDTH}, "reduce-scatter": {4.0 * WIDTH * WIDTH}}
    found: Any = autopar.verify(step, *args, plan=plan, hardware="h100-sxm", compiler=absent_gpus)
    assert not [name for stage in found.stages for name in stage.off]


def test_the_step_is_that_of_one_device() -> None:
    """Gradients leave the loop scattered, as the parameters are."""
    keys = jax.random.split(jax.random.key(0), 5)
    args = [jax.random.normal(key, (64, 64)) / 8 for key in keys[1:]], jax.random.normal(keys[0], (64, 64))
    run, pipeline = pipelined(step, args, num_stages=2, num_microbatches=4, mesh="4", option=0)
    for one, other in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-4)
    for stage in pipeline.pieces:
        sums = [stage.layout.trace.equations[one.leave].results[0] for one in stage.partial.values()]
        defined = [
            stage.replay.shardings.at_definition[value][-1] for value in sums if stage.layout.trace.avals[value].ndim
        ]
        assert len(defined) == 2 and all("data" in one.axes for one in defined)


def read_uncast(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel.astype(jnp.bfloat16) + (x.astype(jnp.float32) @ kernel).astype(jnp.bfloat16)


def read_reversed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    narrow = kernel.astype(jnp.bfloat16)
    return x @ narrow + x[:, ::-1] @ narrow[::-1]


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("layer", [read_uncast, read_reversed])
def test_a_parameter_with_other_readers_is_gathered_as_it_is(
    layer: Callable[[jax.Array, jax.Array], jax.Array], absent_gpus: Compiler
) -> None:
    def step(params: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            x = batch.astype(jnp.bfloat16)
            for kernel in params:
                x = jnp.tanh(layer(x, kernel))
            return jnp.mean((x.astype(jnp.float32) - batch) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    args = arguments()
    plan: Any = autopar.plan(step, *args, mesh="4", pin={"params/*": P("data")}, **OPTIONS)
    once = [use for stage in plan.stages for use in stage.plan.collectives if use.num_times == 1]
    assert {use.num_bytes for use in once if use.kind == "all-gather"} == {4.0 * WIDTH * WIDTH}
    found: Any = autopar.verify(step, *args, plan=plan, hardware="h100-sxm", compiler=absent_gpus)
    assert not [name for stage in found.stages for name in stage.off if "all-gather" in name]
