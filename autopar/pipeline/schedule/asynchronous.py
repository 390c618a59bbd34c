"""Order tasks of pipelines that do not wait for updates: AMPNet, PipeDream, PipeDream-2BW, PipeMare.

Microbatches of one batch follow those of the batch before without a pause. Each stage alternates one forward and one
backward pass, as in 1F1B, and updates its weights as soon as it has the gradients of a whole batch. After filling, no
submesh idles. The entries differ in the version of the weights that their tasks read (`versions`).

The order of a stage does not depend on how many batches follow: that of fewer batches is the same without their tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.objective import Objective
from autopar.pipeline.schedule.one_forward_one_backward import alternating
from autopar.pipeline.schedule.tasks import Edges, Orders, Task, synchronous_needs
from autopar.pipeline.schedule.versions import (
    DOUBLE_BUFFER,
    LATEST,
    LATEST_CORRECTED,
    STASH,
    VERTICAL,
    VersionRule,
)


def _streamed(shape: PipelineShape) -> Orders:
    """1F1B over the microbatches of all batches, with each update after the last backward pass of its batch."""
    return tuple(_of_stage(stage, shape) for stage in range(shape.num_submeshes))


def _of_stage(stage: int, shape: PipelineShape) -> tuple[Task, ...]:
    per_update = shape.num_microbatches
    count = per_update * shape.num_updates
    passes = alternating(
        [Task(stage, microbatch, "forward") for microbatch in range(count)],
        [Task(stage, microbatch, "backward") for microbatch in range(count)],
        warm_up=shape.num_submeshes - 1 - stage,
    )
    order: list[Task] = []
    for task in passes:
        order.append(task)
        if task.phase == "backward" and (task.microbatch + 1) % per_update == 0:
            order.append(Task(stage, task.microbatch + 1 - per_update, "update"))
    return tuple(order)


def _needs(orders: Orders, edges: Edges) -> dict[Task, tuple[Task, ...]]:
    """Those of a synchronous step, but an update depends on the gradients of its own batch."""
    needs = synchronous_needs(orders, edges)
    for order in orders:
        gradients: list[Task] = []
        for task in order:
            if task.phase == "update":
                needs[task] = tuple(gradients)
                gradients = []
            elif task.phase == "backward":
                gradients.append(task)
    return needs


def _flowing(num_microbatches: int, virtual: int) -> Objective:
    """After filling, a batch takes as long as on the slowest stage. A stage has a microbatch in flight for itself and one
    for each later stage, whatever the number per update."""
    return Objective(
        once_s=lambda cost: 0.0 * cost.forward_s,
        repeated_s=lambda cost: num_microbatches * cost.pass_s + cost.update_s,
        in_flight=lambda after, num_submeshes: after + 1,
        transfer_once=0.0,
    )


def _kind(name: str, description: str, reads: VersionRule) -> ScheduleKind:
    def requires(shape: PipelineShape) -> str | None:
        if shape.virtual == 1 and reads.needs_filled and shape.num_microbatches < shape.num_submeshes:
            return (
                f"keeps two versions only with at least as many microbatches per update as stages, {shape.num_submeshes},"
                f" not {shape.num_microbatches}: raise `num_microbatches`, or take 'pipedream'"
            )
        return one_stage_each(shape)

    return ScheduleKind(
        name=name,
        description=description,
        orders=_streamed,
        needs=_needs,
        requires=requires,
        bubble="(p - 1)(F + B), once for all batches",
        bubble_s=lambda even: even.filling_and_draining_s,
        in_flight=lambda shape: tuple(
            min(shape.num_submeshes - submesh, shape.num_microbatches * shape.num_updates)
            for submesh in range(shape.num_submeshes)
        ),
        objective=_flowing,
        reads=reads,
    )


PIPEDREAM = _kind("pipedream", "Streams batches; a backward pass reads the weights that its forward pass read.", STASH)
VERTICAL_SYNC = _kind("vertical", "Streams batches; all stages read one version for a microbatch.", VERTICAL)
TWO_BW = _kind("2bw", "Streams batches; all stages read the version before that of the batch.", DOUBLE_BUFFER)
AMPNET = _kind("ampnet", "Streams batches; every task reads the latest weights.", LATEST)
PIPEMARE = _kind(
    "pipemare", "Streams batches; every task reads the latest weights, which backward passes correct.", LATEST_CORRECTED
)

#: The asynchronous schedules, by the name that `consistency=` takes.
ASYNCHRONOUS: Mapping[str, ScheduleKind] = MappingProxyType(
    {kind.name: kind for kind in (PIPEDREAM, VERTICAL_SYNC, TWO_BW, AMPNET, PIPEMARE)}
)
