"""Cut steps into stages and run them on virtual devices, for tests.

In: a step and its arguments, a number of stages and microbatches, a schedule. Out: the step as a function, stage by
stage. The stages have equally many layers of equal FLOPs, on equally many devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontend.equations import LiteralOperand
from autopar.hardware.profile import load
from autopar.pipeline.cut.stage_programs import Cuttable, StageProgram
from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.run.executor import Pipeline, PlannedStage
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.table import build
from autopar.pipeline.search.stage_costs import StageCosts
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.transforms.program import program_of
from benchmarks.pipeline.execution import equal_starts
from tests.planned import plan_program

QUICKLY = {"xla_backend_optimization_level": 0}


def pipelined(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    num_stages: int,
    num_microbatches: int,
    schedule: str | ScheduleKind = "1f1b",
    virtual: int = 1,
    mesh: str | Sequence[str] | None = None,
    own_statistics: bool = False,
    splits_loops: bool = False,
    option: int | None = None,
    starts: Sequence[int] | None = None,
) -> tuple[Callable[..., Any], Pipeline]:
    """The step, run in stages, and what runs it.

    Args:
        num_stages: submeshes; each runs `virtual` stages of the program.
        mesh: of each submesh, or one per stage; by default any of all its devices.
        own_statistics: whether each microbatch may have its own.
        splits_loops: whether loops of the backward pass are split.
        option: of `StageCosts`, how much the backward pass computes again; by default nothing.
        starts: the first unit of each stage; by default stages have about equal FLOPs.
    """
    program = program_of(step, args, carry=None, donate=None)
    cuttable = Cuttable.of(program, own_statistics=own_statistics, splits_loops=splits_loops)
    count = num_stages * virtual
    if starts is None:
        starts = equal_starts(cuttable.chain, count)
    layers = cuttable.layers(starts, num_microbatches)
    stages = layers.stages(range(count))
    costs = StageCosts(layers, {"cpu-host": load("cpu-host")}, range(count))
    built = build(schedule, num_stages, num_microbatches, virtual=virtual)

    def plan_of(number: int, stage: StageProgram, num_devices: int) -> Plan:
        if option is None:
            its_mesh = mesh if mesh is None or isinstance(mesh, str) else mesh[number]
            return plan_program(
                stage.program, mesh=its_mesh, num_devices=num_devices, all_devices=True, hardware="cpu-host"
            )
        return costs.planned(number, number, SubmeshShape("cpu-host", 1, num_devices, option=option), stage).plan

    planned = planned_stages(stages, built.replicas, plan_of)
    literals = {i: o.value for i, o in enumerate(program.trace.outputs) if isinstance(o, LiteralOperand)}
    pipeline = Pipeline(planned, built, len(program.trace.outputs), literals, compiler_options=QUICKLY)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(program.trace.out_tree, pipeline.run(jax.tree.leaves(args)))

    return run, pipeline


def planned_stages(
    stages: Sequence[StageProgram],
    places: Sequence[Sequence[int]],
    plan_of: Callable[[int, StageProgram, int], Plan],
) -> list[PlannedStage]:
    """Stages, each planned for its submeshes: equal shares of all devices."""
    per_submesh = len(jax.devices()) // (1 + max(submesh for of_stage in places for submesh in of_stage))
    planned: list[PlannedStage] = []
    for number, (stage, submeshes) in enumerate(zip(stages, places, strict=True)):
        plan = plan_of(number, stage, per_submesh)
        own = [jax.devices()[submesh * per_submesh : (submesh + 1) * per_submesh] for submesh in submeshes]
        mesh, *replicas = (execute.make_mesh(plan.mesh, devices) for devices in own)
        planned.append(PlannedStage(stage, plan, mesh, tuple(replicas)))
    return planned


def assert_alike(
    step: Callable[..., Any],
    state: Any,
    batch_of: Callable[[int], Any],
    *,
    plain: Callable[..., Any] | None = None,
    steps: int = 2,
    tolerance: float = 1e-5,
    **options: Any,
) -> Pipeline:
    """See that a step `(state, batch) -> (state, ...)` computes in stages what it does by itself.

    Args:
        plain: what computes the same; by default the step.
        tolerance: relative to the largest element of a leaf.
        options: of `pipelined`; by default each submesh has one axis.
    """
    options.setdefault("mesh", str(len(jax.devices()) // options["num_stages"]))
    run, pipeline = pipelined(step, (state, batch_of(0)), **options)
    plain = plain or jax.jit(step)
    here = there = state
    for seed in range(steps):
        here, *found = run(here, batch_of(seed))
        there, *expected = plain(there, batch_of(seed))
        assert jax.tree.structure((here, found)) == jax.tree.structure((there, expected))
        for one, other in zip(jax.tree.leaves((here, found)), jax.tree.leaves((there, expected)), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
                one, other = jax.random.key_data(one), jax.random.key_data(other)
            scale = float(np.abs(np.asarray(other)).max(initial=0.1))
            np.testing.assert_allclose(np.asarray(one), other, rtol=tolerance, atol=tolerance * scale)
    return pipeline


def crossing(pipeline: Pipeline, kind: str) -> list[tuple[int, ...]]:
    """Shapes of what stages get from others: in each microbatch (`inside`), or once a step (`outside`)."""
    found: list[tuple[int, ...]] = []
    for stage in pipeline.stages:
        structs = jax.tree.leaves(stage.program.program.trace.arguments)
        ports = zip(stage.program.inputs, structs, strict=True)
        found += [struct.shape for port, struct in ports if port.kind == kind]
    return found


def tanh_layers(params: Sequence[jax.Array], x: jax.Array) -> Any:
    """A step of as many equal layers as there are kernels, by gradient descent."""

    def loss(params: Sequence[jax.Array]) -> jax.Array:
        h = x
        for kernel in params:
            h = jnp.tanh(h @ kernel)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value
