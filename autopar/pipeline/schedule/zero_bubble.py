"""Order tasks by ZB-H1 (Zero Bubble Pipeline Parallelism, Qi et al., 2023), with a split backward pass.

The preceding stage waits only for the gradients of its outputs; weight gradients can be computed at any time. So the
input part takes the place of 1F1B's backward pass, and submesh i delays i weight parts, which fill the bubble at the
end. No submesh has more in-flight microbatches than 1F1B's first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from autopar.pipeline.schedule.kind import EvenPipeline, PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.objective import Objective, StageCost
from autopar.pipeline.schedule.one_forward_one_backward import (
    alternating,
    in_rounds,
    is_in_whole_rounds,
    rounds,
    several_stages_each,
)
from autopar.pipeline.schedule.tasks import Orders, Task


def _delayed(alternating_parts: Sequence[Task], delay: int) -> tuple[Task, ...]:
    """Insert the weight part of each backward pass after the input part that is `delay` later, or at the end."""
    order, waiting = list[Task](), deque[Task]()
    for task in alternating_parts:
        order.append(task)
        if task.phase == "input":
            waiting.append(task._replace(phase="weight"))
            if len(waiting) > delay:
                order.append(waiting.popleft())
    return (*order, *waiting)


def _one_stage_each(shape: PipelineShape) -> Orders:
    p, microbatches = shape.num_submeshes, range(shape.num_microbatches)
    return tuple(
        _delayed(
            alternating(
                [Task(stage, microbatch, "forward") for microbatch in microbatches],
                [Task(stage, microbatch, "input") for microbatch in microbatches],
                warm_up=p - 1 - stage,
            ),
            delay=stage,
        )
        for stage in range(p)
    )


def _several_stages_each(shape: PipelineShape) -> Orders:
    p = shape.num_submeshes
    return tuple(
        _delayed(
            alternating(
                in_rounds(shape, submesh, "forward"),
                in_rounds(shape, submesh, "input"),
                warm_up=_warm_up(shape, submesh),
            ),
            delay=submesh,
        )
        for submesh in range(p)
    )


def _warm_up(shape: PipelineShape, submesh: int) -> int:
    return (shape.virtual - 1) * len(rounds(shape)[0]) + shape.num_submeshes - 1 - submesh


def _bubble_s(even: EvenPipeline) -> float:
    """(p - 1)(F + B - W) with B the input part; equally (p - 1)(F + B' - 2W) with B' the whole backward pass."""
    return (even.shape.num_submeshes - 1) * (even.forward_s + even.input_s - even.weight_s)


def _holds(even: EvenPipeline) -> bool:
    """A longer weight part does not fit into the bubble; too few microbatches leave part of the bubble unfilled."""
    enough = even.shape.num_microbatches >= even.shape.num_submeshes
    return enough and even.weight_s <= min(even.forward_s, even.input_s)


def _most_in_flight(shape: PipelineShape) -> tuple[int, ...]:
    """The microbatches of the warm-up, and those whose weight parts wait, together as many on each submesh."""
    most = (shape.virtual - 1) * len(rounds(shape)[0]) + shape.num_submeshes
    return (min(most, shape.virtual * shape.num_microbatches),) * shape.num_submeshes


def _objective(num_microbatches: int, virtual: int) -> Objective:
    """With equal stages, the makespan is m t + the bubble. The in-flight microbatches are those of 1F1B: weight parts that
    wait are not counted, which a simulation does."""

    def once(cost: StageCost) -> float:
        return np.maximum(0.0, cost.forward_s + cost.backward_s - 2 * cost.weight_s)

    return Objective(
        once_s=once,
        repeated_s=lambda cost: num_microbatches * cost.pass_s - once(cost) + cost.update_s,
        in_flight=lambda after, num_submeshes: min(after + 1, num_microbatches),
        transfer_repeated=num_microbatches - 1,
    )


def _objective_of_several(num_microbatches: int, virtual: int) -> Objective:
    one, repeats = _objective(num_microbatches, 1), num_microbatches * virtual

    def in_flight(after: int, num_submeshes: int) -> float:
        return _most_in_flight(PipelineShape(num_submeshes, num_microbatches, virtual))[-1]

    return Objective(
        once_s=lambda cost: one.once_s(cost) / virtual,
        repeated_s=lambda cost: repeats * cost.pass_s - one.once_s(cost) + virtual * cost.update_s,
        in_flight=in_flight,
        transfer_once=1 / virtual,
        transfer_repeated=repeats - 1,
    )


ZB_H1 = ScheduleKind(
    name="zb-h1",
    description="1f1b with a split backward pass: weight gradients are computed where the pipeline would idle.",
    orders=_one_stage_each,
    backward="split",
    requires=one_stage_each,
    bubble="(p - 1)(F + B - 2W)",
    where="m of at least p; W, the weight part of B, no longer than F or than the rest of B",
    bubble_s=_bubble_s,
    holds=_holds,
    in_flight=lambda shape: (min(shape.num_submeshes, shape.num_microbatches),) * shape.num_submeshes,
    objective=_objective,
    is_searched=True,
    in_planned_order=True,
)
INTERLEAVED_ZB = ScheduleKind(
    name="interleaved-zb",
    description="interleaved with a split backward pass: weight gradients are computed where the pipeline would idle.",
    orders=_several_stages_each,
    backward="split",
    requires=several_stages_each,
    bubble="(p - 1)F / v",
    where="F, W and the rest of B equal, m a multiple of p",
    bubble_s=lambda even: even.filling_s,
    holds=lambda even: even.has_equal_parts and is_in_whole_rounds(even),
    in_flight=_most_in_flight,
    virtuals=(2, 3, 4),
    objective=_objective_of_several,
    in_planned_order=True,
)
