"""Prepare a plan to run: one jitted program on a mesh, or the stages of a pipeline; and build its state sharded.

In: a plan, its program, devices. Out: `Prepared`, which runs the step and has the sharding of each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.api.elastic.dealt_step import DealtStep
from autopar.api.elastic.side_by_side import SideBySideStep
from autopar.frontend.call import Results
from autopar.jax_interop.compat import shape_struct
from autopar.jax_interop.compilation import compiled_to_draw, compiling
from autopar.jax_interop.partition_spec import named_shardings
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.run.batches import Gathering
from autopar.pipeline.run.stacked_leaves import assembled, rows_of
from autopar.pipeline.run.step import PipelinedStep
from autopar.pipeline.run.transfers import is_mine, without_shards
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.distributed.argument_layout import Arguments
from autopar.runtime.jitted_step import JittedStep
from autopar.runtime.own_arrays import make_own
from autopar.transforms.program import Program

#: Makes what runs a plan of one program: from the plan, its program, the mesh, and whether it may overwrite arrays of the user.
RunBy = Callable[[Plan, Program, Mesh, bool], DealtStep | SideBySideStep]
#: The sharding of an array; or the sharding of each part of an array that several stages hold.
Place = NamedSharding | dict[Rows, NamedSharding]


@dataclass(slots=True)
class Prepared:
    """A plan ready to run.

    Args:
        results: the parts of the step's result that are no arrays.
        run: the runnable step. A call maps pytrees of arrays to the result; `dispatch` takes flattened arrays.
        in_shardings: the sharding of each array of the arguments.
        uneven: the shardings of the parts of layer stacks that are in unequal parts on several submeshes, which no
            `NamedSharding` describes.
        mesh: the mesh of the program; for a pipeline, the mesh of its first stage.
        probe: the position of the smallest output that no later call donates.
        compiled_for: the shapes and shardings of the first call's arguments.
        measured: the timeline of a pipelined step that was measured last.
    """

    plan: AnyPlan
    program: Program
    results: Results
    run: JittedStep | PipelinedStep | DealtStep | SideBySideStep
    in_shardings: list[NamedSharding]
    mesh: Mesh
    arguments: Arguments
    probe: int | None
    uneven: dict[int, dict[Rows, NamedSharding]] = field(default_factory=dict)
    is_compiled: bool = False
    compiled_for: tuple[Any, ...] = field(default=())
    measured: PipelineTimeline | None = None

    def placed(self, trees: Sequence[Any], *, may_take: bool = False) -> tuple[Any, ...]:
        """The arguments with the plan's shardings.

        Args:
            may_take: whether arrays that the user made may be donated.
        """
        if isinstance(self.plan, PipelinePlan):  # it places each part itself
            return tuple(trees)
        return execute.placed(self.plan, self.in_shardings, self.arguments.whole(trees), may_take=may_take)

    def compiling(self, trees: Sequence[Any]) -> Callable[[], None]:
        """Start to compile the program in a thread, for arguments of these shapes.

        Returns:
            A function that waits for the compilation. Nothing is compiled for several programs; with several processes, which
            must compile in the same order because XLA lets them exchange autotuning results; or with JAX's NaN checks,
            which only a jitted function can attribute.
        """
        checks_nans = jax.config.jax_debug_nans or jax.config.jax_debug_infs
        run = self.run
        if self.is_compiled or not isinstance(run, JittedStep) or jax.process_count() > 1 or checks_nans:
            return lambda: None
        wait = compiling(run.lower(jax.tree.map(shape_struct, tuple(trees))))

        def use() -> None:
            with suppress(jax.errors.JaxRuntimeError):  # the first call raises it again
                run.use(wait())
                self.is_compiled = True

        return use

    @property
    def places(self) -> list[Place]:
        """The sharding of each array of the arguments, or the shardings of its parts."""
        return [self.uneven.get(position, sharding) for position, sharding in enumerate(self.in_shardings)]

    @property
    def whole(self) -> NamedSharding:
        """The sharding of arrays that are not in the plan: replicated on every device of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec())


def prepared_of(
    name: str,
    plan: AnyPlan,
    program: Program,
    results: Results,
    devices: Mesh | Sequence[Any],
    *,
    may_take: bool = False,
    run_by: RunBy | None = None,
) -> Prepared:
    """Prepare a plan to run.

    Args:
        name: the step's name.
        devices: the mesh of one program, or all devices of a pipeline in order.
        may_take: whether arrays that the user made may be donated.
        run_by: makes what runs a plan of one program, in place of a jitted step.
    """
    run: JittedStep | PipelinedStep | DealtStep | SideBySideStep
    if isinstance(plan, PipelinePlan):
        assert not isinstance(devices, Mesh)
        run = PipelinedStep(plan, program, devices, may_take=may_take)
        shardings, mesh = run.in_shardings, run.meshes[0]
    else:
        assert isinstance(devices, Mesh)
        mesh = devices
        if run_by is None:
            run = JittedStep(plan, program.trace, devices, may_take=may_take)
        else:
            run = run_by(plan, program, devices, may_take)
        shardings = named_shardings([tensor.sharding for tensor in plan.inputs], devices)
    uneven = run.uneven if isinstance(run, PipelinedStep) else {}
    gathers = Gathering if isinstance(run, PipelinedStep) and jax.process_count() > 1 else None
    carried = {position for _, position in plan.carried}
    free = [(tensor.num_bytes, i) for i, tensor in enumerate(plan.outputs) if i not in carried]
    return Prepared(
        plan=plan,
        program=program,
        results=results,
        run=run,
        in_shardings=list(shardings),
        mesh=mesh,
        arguments=Arguments(name, plan, shardings, gathers, run.rows if isinstance(run, DealtStep) else None),
        probe=min(free)[1] if free else None,
        uneven=uneven,
    )


def built(
    create: Callable[..., list[Any]], trees: Sequence[Any], shapes: Sequence[Any], places: Sequence[Place]
) -> list[Any]:
    """Run a function that creates arrays, so that each result has its sharding from the start.

    Args:
        create: a function from pytrees to one array per place, of these shapes. It is compiled once per mesh, for the
            arrays on that mesh. Arrays of other processes have no local shards.
    """
    by_mesh: dict[Any, list[tuple[int, Rows | None, NamedSharding]]] = {}
    for position, place in enumerate(places):
        parts = {None: place} if isinstance(place, NamedSharding) else place
        for rows, sharding in parts.items():
            by_mesh.setdefault(sharding.mesh, []).append((position, rows, sharding))
    parts_of: list[dict[Rows | None, Any]] = [{} for _ in places]
    for on_mesh in by_mesh.values():
        if not is_mine(on_mesh[0][2]):
            for position, rows, sharding in on_mesh:
                struct = (
                    shapes[position] if rows is None else jax.eval_shape(partial(rows_of, rows=rows), shapes[position])
                )
                parts_of[position][rows] = without_shards(struct.shape, struct.dtype, sharding)
            continue

        def create_here(*args: Any, wanted: Sequence[tuple[int, Rows | None, Any]] = tuple(on_mesh)) -> list[Any]:
            arrays = create(*args)
            return [arrays[n] if rows is None else rows_of(arrays[n], rows) for n, rows, _ in wanted]

        create_here.__name__ = getattr(create, "__name__", "create")
        shardings = [sharding for _, _, sharding in on_mesh]
        arrays = (_created_on_cpus if _are_local_cpus(shardings[0]) else _created)(create_here, trees, shardings)
        make_own(arrays)
        for (position, rows, _), array in zip(on_mesh, arrays, strict=True):
            parts_of[position][rows] = array
    return [assembled(parts) for parts in parts_of]


def _created(create: Callable[..., list[Any]], trees: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    return jax.jit(create, out_shardings=list(shardings))(*trees)


def _are_local_cpus(sharding: NamedSharding) -> bool:
    """Whether all devices of a sharding are CPUs of this process, which share one memory."""
    process = jax.process_index()
    return all(device.platform == "cpu" and device.process_index == process for device in sharding.device_set)


def _created_on_cpus(
    create: Callable[..., list[Any]], trees: Sequence[Any], shardings: Sequence[NamedSharding]
) -> list[Any]:
    """Compile for one device, which takes half as long as for several that share its memory. Then shard the arrays one
    after another, so that at most one of them exists twice."""
    device = min(shardings[0].device_set, key=lambda device: device.id)
    args = jax.device_put(tuple(trees), device)
    # With `out_shardings`, no result shares the buffer of an argument.
    arrays = list(compiled_to_draw(jax.jit(create, out_shardings=SingleDeviceSharding(device)), args)(*args))
    for position, sharding in enumerate(shardings):
        arrays[position] = jax.block_until_ready(_laid_out(arrays[position], sharding))
    return arrays


def _laid_out(array: Any, sharding: NamedSharding) -> Any:
    """Shard an array through NumPy, because JAX would compile a program for each shape of a slice."""
    if sharding.is_fully_replicated or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return jax.device_put(array, sharding)
    return jax.device_put(np.asarray(array), sharding, may_alias=False)
