"""Measure what a call of the parallelized step costs over plain `jit` with the same shardings.

The argument is GPT-2 small's full `TrainState` (AdamW, fp32), donated, on one CPU device and sharded over 8 virtual
ones. The step only increments counters, so that dispatch is timed and not arithmetic: the seconds until the Python call
returns, with no earlier call in flight. The contenders are called in turn, each with the state that its own last call
returned; the median of the differences within a turn counts. A second, identical `jit` shows the noise. With 8 devices
it is large, because they share this machine's cores with the caller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import autopar
from autopar.plans.plan import Plan
from benchmarks.models import gpt2_small_target
from benchmarks.timing import take_turns

Row = dict[str, str | float | bool]

ROUNDS = 1000
LIMIT_US = 50.0
#: Budget below the state's 1.5 GB: it makes the plan shard the state, since the step has no arithmetic to do so.
MEMORY_BUDGET_BYTES = 400e6


def count_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    """A step with the arguments of a real train step and almost no work."""
    return state.replace(step=state.step + batch["increment"]), batch["increment"]


class Caller:
    """Passes a state through one step repeatedly, and times only the calls."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> float:
        """Seconds until a call of the step returns; waiting for its results is not timed."""
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        self.state, _ = self.step(self.state, self.batch)
        return time.perf_counter() - start


def plain_jit(plan: Plan) -> Callable[..., Any]:
    """The same step under plain `jit`, with the plan's own shardings."""
    types = (AxisType.Auto,) * len(plan.mesh.axis_names)
    devices = jax.devices()[: plan.mesh.num_devices]
    mesh = jax.make_mesh(plan.mesh.axis_sizes, plan.mesh.axis_names, axis_types=types, devices=devices)
    shardings = {"in_shardings": plan.in_shardings(mesh), "out_shardings": plan.out_shardings(mesh)}
    return jax.jit(lambda state, batch: count_step(state, batch), donate_argnums=0, **shardings)


def measure(program: str) -> list[Row]:
    """One row per contender."""
    num_devices = {"gpt2_small_one_device": 1, "gpt2_small": 8}[program]
    _, (shapes, _) = gpt2_small_target()
    batch = {"increment": jnp.ones((), jnp.int32)}
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    budget = MEMORY_BUDGET_BYTES if num_devices > 1 else None
    step = autopar.parallelize(count_step, mesh=mesh, memory_budget_bytes=budget)

    def zeros() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    plan = step.plan(step.init(zeros, batch=batch), batch)
    ways = {"jit": plain_jit(plan), "the same jit again": plain_jit(plan), "autopar": step}
    calls = {name: Caller(way, step.init(zeros, batch=batch), batch) for name, way in ways.items()}
    times = take_turns(calls, ROUNDS, warmup=20)
    leaves = len(jax.tree.leaves(shapes))
    return [_row(name, times[name], times["jit"], plan, leaves) for name in ways]


def _row(name: str, times: list[float], jit_times: list[float], plan: Plan, leaves: int) -> Row:
    over_us = 1e6 * statistics.median(ours - theirs for ours, theirs in zip(times, jit_times, strict=True))
    return {
        "call": name,
        "leaves": leaves,
        "mesh": str(plan.mesh),
        "median_us": 1e6 * statistics.median(times),
        "over_jit_us": over_us,
        "limit_us": LIMIT_US,
        "met": over_us <= LIMIT_US,
    }
