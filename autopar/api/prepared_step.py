"""Prepare a plan to run, as one jitted program or as pipeline stages, and build its state sharded.

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
from autopar.runtime import jit as execute
from autopar.runtime.distributed.argument_layout import Arguments
from autopar.runtime.jitted_step import JittedStep
from autopar.runtime.own_arrays import make_own
from autopar.transforms.program import Program

#: The sharding of an array, or of each of its parts.
Place = NamedSharding | dict[Rows, NamedSharding]


@dataclass(slots=True)
class Prepared:
    """A plan ready to run.

    Args:
        results: the static parts of the step's result, which are no arrays.
        run: maps pytrees of arrays to those of the result; its `dispatch` takes the flattened arrays.
        in_shardings: the sharding of each array of the arguments. uneven: the sharding of each part of a stack of
            layers that is divided unevenly over several stages, which no single sharding expresses.
        mesh: the mesh of one program, or of the first stage of a pipeline.
        probe: the position of the smallest output that no later call donates.
        compiled_for: shapes and shardings of its first arguments.
        measured: the timeline of the last measured step of a pipeline.
    """

    plan: AnyPlan
    program: Program
    results: Results
    run: JittedStep | PipelinedStep
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
        if isinstance(self.plan, PipelinePlan):  # it takes each part as it is
            return tuple(trees)
        return execute.placed(self.plan, self.in_shardings, self.arguments.whole(trees), may_take=may_take)

    def compiling(self, trees: Sequence[Any]) -> Callable[[], None]:
        """Start to compile the program for arguments of these shapes, in a thread.

        Returns:
            A function that waits for the compilation. Nothing is compiled ahead for a pipeline; with several processes,
            which must compile in the same order because they exchange autotuning results; and with `jax_debug_nans`,
            which needs the jitted function.
        """
        looks = jax.config.jax_debug_nans or jax.config.jax_debug_infs
        run = self.run
        if self.is_compiled or isinstance(run, PipelinedStep) or jax.process_count() > 1 or looks:
            return lambda: None
        wait = compiling(run.lower(jax.tree.map(shape_struct, tuple(trees))))

        def use() -> None:
            with suppress(jax.errors.JaxRuntimeError):  # the first call raises it again
                run.use(wait())
                self.is_compiled = True

        return use

    @property
    def places(self) -> list[Place]:
        """The sharding of each array of the arguments."""
        return [self.uneven.get(position, sharding) for position, sharding in enumerate(self.in_shardings)]

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that is not in the plan: replicated on every device of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec())


def prepared_of(
    name: str,
    plan: AnyPlan,
    program: Program,
    results: Results,
    devices: Mesh | Sequence[Any],
    *,
    may_take: bool = False,
) -> Prepared:
    """Prepare a plan to run.

    Args:
        name: the name of the step.
        devices: the mesh of one program; or all devices of a pipeline, in order.
        may_take: whether arrays that the user made may be donated.
    """
    if isinstance(plan, PipelinePlan):
        assert not isinstance(devices, Mesh)
        run = PipelinedStep(plan, program, devices, may_take=may_take)
        shardings, mesh = run.in_shardings, run.meshes[0]
    else:
        assert isinstance(devices, Mesh)
        run, mesh = JittedStep(plan, program.trace, devices, may_take=may_take), devices
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
        arguments=Arguments(name, plan, shardings, gathers),
        probe=min(free)[1] if free else None,
        uneven=uneven,
    )


def built(
    create: Callable[..., list[Any]], trees: Sequence[Any], shapes: Sequence[Any], places: Sequence[Place]
) -> list[Any]:
    """The arrays that a function creates, each created with its sharding.

    Args:
        create: maps pytrees to arrays of these shapes, one per place. It is compiled once for each mesh among the
            places, for the arrays there. Arrays of other processes have no shards in the result.
    """
    by_mesh: dict[Any, list[tuple[int, Rows | None, NamedSharding]]] = {}
    for position, place in enumerate(places):
        parts = {None: place} if isinstance(place, NamedSharding) else place
        for rows, sharding in parts.items():
            by_mesh.setdefault(sharding.mesh, []).append((position, rows, sharding))
    found: list[dict[Rows | None, Any]] = [{} for _ in places]
    for own in by_mesh.values():
        if not is_mine(own[0][2]):
            for position, rows, sharding in own:
                struct = (
                    shapes[position] if rows is None else jax.eval_shape(partial(rows_of, rows=rows), shapes[position])
                )
                found[position][rows] = without_shards(struct.shape, struct.dtype, sharding)
            continue

        def some(*given: Any, own: Sequence[tuple[int, Rows | None, Any]] = tuple(own)) -> list[Any]:
            made = create(*given)
            return [made[position] if rows is None else rows_of(made[position], rows) for position, rows, _ in own]

        some.__name__ = getattr(create, "__name__", "create")
        shardings = [sharding for _, _, sharding in own]
        arrays = (_made_on_cpus if _are_own_cpus(shardings[0]) else _made)(some, trees, shardings)
        make_own(arrays)
        for (position, rows, _), array in zip(own, arrays, strict=True):
            found[position][rows] = array
    return [assembled(parts) for parts in found]


def _made(create: Callable[..., list[Any]], trees: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    return jax.jit(create, out_shardings=list(shardings))(*trees)


def _are_own_cpus(sharding: NamedSharding) -> bool:
    """Whether the devices are CPUs of this process, which share one memory."""
    mine = jax.process_index()
    return all(device.platform == "cpu" and device.process_index == mine for device in sharding.device_set)


def _made_on_cpus(
    create: Callable[..., list[Any]], trees: Sequence[Any], shardings: Sequence[NamedSharding]
) -> list[Any]:
    """Create the arrays on one CPU, which compiles in half the time, and then shard them one by one, so that at most
    one array exists twice.
    """
    one = min(shardings[0].device_set, key=lambda device: device.id)
    given = jax.device_put(tuple(trees), one)
    # With `out_shardings`, no result is an argument's own buffer.
    arrays = list(compiled_to_draw(jax.jit(create, out_shardings=SingleDeviceSharding(one)), given)(*given))
    for position, sharding in enumerate(shardings):
        arrays[position] = jax.block_until_ready(_laid_out(arrays[position], sharding))
    return arrays


def _laid_out(array: Any, sharding: NamedSharding) -> Any:
    """Shard an array through NumPy: JAX would compile a program for each shape of a slice."""
    if sharding.is_fully_replicated or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return jax.device_put(array, sharding)
    return jax.device_put(np.asarray(array), sharding, may_alias=False)
