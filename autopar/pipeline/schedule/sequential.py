"""Order tasks without interleaving of phases: `none`, `inference` and `gpipe`.

`none` runs one microbatch after another and shows what stages cost without pipelining. `inference` runs forward passes
only. `gpipe` (Huang et al., 2019) runs all forward passes before all backward passes.
"""

from __future__ import annotations

from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.objective import Objective
from autopar.pipeline.schedule.tasks import Orders, Task


def _one_after_another(shape: PipelineShape) -> Orders:
    """Each backward pass follows its forward pass; the first stage then waits for it before the next microbatch."""
    return tuple(
        tuple(task for m in range(shape.num_microbatches) for task in (Task(s, m, "forward"), Task(s, m, "backward")))
        for s in range(shape.num_submeshes)
    )


def _forward_only(shape: PipelineShape) -> Orders:
    return tuple(
        tuple(Task(s, m, "forward") for m in range(shape.num_microbatches)) for s in range(shape.num_submeshes)
    )


def _forward_then_backward(shape: PipelineShape) -> Orders:
    """Backward passes in the order of forward passes, so that gradients are added in the order of the unpipelined
    loop."""
    return tuple(
        (*forward, *(Task(task.stage, task.microbatch, "backward") for task in forward))
        for forward in _forward_only(shape)
    )


def _on_each(number: int, shape: PipelineShape) -> tuple[int, ...]:
    return (number,) * shape.num_submeshes


def _waiting_for_all(num_microbatches: int, virtual: int) -> Objective:
    """A microbatch starts when the previous one is done."""
    return Objective(
        once_s=lambda cost: num_microbatches * cost.pass_s,
        repeated_s=lambda cost: cost.update_s,
        in_flight=lambda after, num_submeshes: 1,
        transfer_once=num_microbatches,
    )


def _flowing_forward(num_microbatches: int, virtual: int) -> Objective:
    repeats = num_microbatches - 1
    return Objective(
        once_s=lambda cost: cost.forward_s,
        repeated_s=lambda cost: repeats * cost.forward_s,
        in_flight=lambda after, num_submeshes: 1,
    )


def _flowing_there_and_back(num_microbatches: int, virtual: int) -> Objective:
    repeats = num_microbatches - 1
    return Objective(
        once_s=lambda cost: cost.pass_s,
        repeated_s=lambda cost: repeats * cost.pass_s + cost.update_s,
        in_flight=lambda after, num_submeshes: num_microbatches,
    )


NONE = ScheduleKind(
    name="none",
    description="One microbatch after another through all stages: one submesh works at a time.",
    orders=_one_after_another,
    requires=one_stage_each,
    bubble="m(p - 1)(F + B)",
    bubble_s=lambda even: even.shape.num_microbatches * even.filling_and_draining_s,
    in_flight=lambda shape: _on_each(1, shape),
    objective=_waiting_for_all,
)
INFERENCE = ScheduleKind(
    name="inference",
    description="Forward passes only; microbatches follow each other through the stages.",
    orders=_forward_only,
    backward="none",
    requires=one_stage_each,
    bubble="(p - 1)F",
    bubble_s=lambda even: even.filling_s,
    in_flight=lambda shape: _on_each(1, shape),
    objective=_flowing_forward,
    is_searched=True,
)
GPIPE = ScheduleKind(
    name="gpipe",
    description="All forward passes, then all backward passes: all microbatches are in flight at once.",
    orders=_forward_then_backward,
    requires=one_stage_each,
    bubble="(p - 1)(F + B)",
    bubble_s=lambda even: even.filling_and_draining_s,
    in_flight=lambda shape: _on_each(shape.num_microbatches, shape),
    objective=_flowing_there_and_back,
)
