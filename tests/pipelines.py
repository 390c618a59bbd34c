"""Steps cut into stages and run on virtual devices, for tests.

In: a step and its arguments, a number of stages and microbatches, a schedule. Out: the step as a function, stage by stage.
Each stage has as many layers of equal work as the others, on as many devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar import execute, planner
from autopar.cost.hardware import load
from autopar.equations import LiteralOperand
from autopar.pipeline.cluster import SubmeshShape
from autopar.pipeline.cutting import Cuttable
from autopar.pipeline.flow import Chain
from autopar.pipeline.run import Pipeline, PlannedStage
from autopar.pipeline.schedules.table import build
from autopar.pipeline.stage_costs import StageCosts
from autopar.program import program_of

QUICKLY = {"xla_backend_optimization_level": 0}


def equal_starts(chain: Chain, num_layers: int) -> list[int]:
    """Where layers begin that have about equal work, each at the narrowest place nearby."""
    upto, total = np.cumsum(chain.flops), sum(chain.flops)
    starts, reach = [0], max(len(chain.units) // (4 * num_layers), 1)
    for layer in range(1, num_layers):
        at = int(np.searchsorted(upto, total * layer / num_layers))
        places = range(max(at - reach, starts[-1] + 1), min(at + reach, len(chain.units) - 1) + 1)
        starts.append(min(places, key=lambda i: (chain.cut_bytes[i - 1], abs(i - at))))
    return starts


def pipelined(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    num_stages: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    virtual: int = 1,
    mesh: str | None = None,
    option: int | None = None,
) -> tuple[Callable[..., Any], Pipeline]:
    """The step, run in stages, and what runs it.

    Args:
        num_stages: submeshes; each runs `virtual` stages of the program.
        mesh: of each submesh; by default any of all its devices.
        option: of `StageCosts`, how much the backward pass computes again; by default nothing.
    """
    program = program_of(step, args, carry=None, donate=None)
    cuttable = Cuttable.of(program)
    count = num_stages * virtual
    layers = cuttable.layers(equal_starts(cuttable.chain, count), num_microbatches)
    stages = layers.stages(range(count))
    costs = StageCosts(layers, {"cpu-host": load("cpu-host")}, range(count))
    built = build(schedule, num_stages, num_microbatches, virtual=virtual)
    per_submesh = len(jax.devices()) // num_stages
    submesh_of = {task.stage: submesh for task, submesh in built.submesh_of().items()}
    planned = []
    for number, stage in enumerate(stages):
        if option is None:
            plan = planner.plan_program(stage.program, mesh=mesh, num_devices=per_submesh, hardware="cpu-host")
        else:
            shape = SubmeshShape("cpu-host", 1, per_submesh, option=option)
            plan = costs.planned(number, number, shape, stage).plan
        first = submesh_of[number] * per_submesh
        devices = jax.devices()[first : first + per_submesh]
        planned.append(PlannedStage(stage, plan, execute.make_mesh(plan.mesh, devices)))
    literals = {i: o.value for i, o in enumerate(program.trace.outputs) if isinstance(o, LiteralOperand)}
    pipeline = Pipeline(planned, built, len(program.trace.outputs), literals, compiler_options=QUICKLY)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(program.trace.out_tree, pipeline.run(jax.tree.leaves(args)))

    return run, pipeline
