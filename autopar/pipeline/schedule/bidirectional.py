"""Order the tasks of two pipelines of the same stages that run in opposite directions.

In: a `PipelineShape` with an even number of submeshes.
Out: the entries of Chimera and DualPipe. Stage s runs on submesh s for the microbatches of the
first direction, and on submesh p - 1 - s for those of the second, so each stage has two instances with equal state.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.pipeline.schedule.kind import EvenPipeline, PipelineShape, ScheduleKind, both_ways
from autopar.pipeline.schedule.objective import Objective, StageCost
from autopar.pipeline.schedule.one_forward_one_backward import is_in_whole_rounds
from autopar.pipeline.schedule.tasks import Orders, Phase, Task

__all__ = ["CHIMERA", "DUALPIPE"]


def _chimera(shape: PipelineShape) -> Orders:
    """Chimera (Li and Hoefler, arXiv:2107.06925), concatenated directly.

    A unit has p microbatches, half of them in each direction; the last unit may have fewer. If forward and backward
    passes take one slot each, the tasks of a unit on one submesh have slots of their own, and the next unit fits 2p
    slots later. The orders follow these slots.
    """
    p = shape.num_submeshes
    slots: list[list[tuple[int, Task]]] = [[] for _ in range(p)]
    for first in range(0, shape.num_microbatches, p):
        size = min(p, shape.num_microbatches - first)
        num_down = (size + 1) // 2
        for n in range(size):
            is_down = n < num_down
            start = 2 * first + 2 * (n if is_down else n - num_down)
            for stage in range(p):
                order = slots[stage if is_down else p - 1 - stage]
                order.append((start + stage, Task(stage, first + n, "forward")))
                order.append((start + 2 * p - 1 - stage, Task(stage, first + n, "backward")))
    return tuple(tuple(task for _, task in sorted(order)) for order in slots)


def _chimera_in_flight(shape: PipelineShape) -> tuple[int, ...]:
    """Of each direction, at most half a unit and one microbatch for each submesh to the end."""
    p, size = shape.num_submeshes, min(shape.num_submeshes, shape.num_microbatches)
    return tuple(min(p - on, (size + 1) // 2) + min(on + 1, size // 2) for on in range(p))


def _chimera_requires(shape: PipelineShape) -> str | None:
    if reason := _pairs_of_submeshes(shape):
        return reason
    if shape.num_microbatches < 2:
        return "sends microbatches through in both directions: take at least 2 microbatches, not 1"
    return None


def _dualpipe(shape: PipelineShape) -> Orders:
    """DualPipe (DeepSeek-AI, arXiv:2412.19437), by the eight steps of its published program.

    A submesh runs one task at a time, so a pair that DualPipe overlaps runs one after the other, the forward pass
    first. A backward pass that it does not split is an input part followed by its weight part.
    """
    p, half = shape.num_submeshes, shape.num_microbatches // 2
    return tuple(tuple(_dualpipe_on(on, p, half)) for on in range(p))


def _dualpipe_on(on: int, p: int, half: int) -> Iterator[Task]:
    """The tasks of one submesh. Direction 0 is the one whose start is nearer."""
    from_edge = min(on, p - 1 - on)
    to_middle = p // 2 - 1 - from_edge
    flips = on >= p // 2
    next_forward, next_backward = [0, 0], [0, 0]
    waiting: list[Task] = []

    def task(direction: int, microbatch: int, phase: Phase) -> Task:
        second = bool(direction) != flips
        return Task(p - 1 - on if second else on, microbatch + half * second, phase)

    def forward(direction: int) -> Iterator[Task]:
        yield task(direction, next_forward[direction], "forward")
        next_forward[direction] += 1

    def backward(direction: int, *, split: bool = False) -> Iterator[Task]:
        yield task(direction, next_backward[direction], "input")
        weight_part = task(direction, next_backward[direction], "weight")
        next_backward[direction] += 1
        if split:
            waiting.append(weight_part)
        else:
            yield weight_part

    for _ in range(2 * to_middle):
        yield from forward(0)
    for _ in range(from_edge + 1):
        yield from forward(0)
        yield from forward(1)
    for _ in range(to_middle):
        yield from backward(1, split=True)
        yield waiting.pop(0)
        yield from forward(1)
    for _ in range(half - p + from_edge + 1):
        yield from forward(0)
        yield from backward(1)
        yield from forward(1)
        yield from backward(0)
    for _ in range(to_middle):
        yield from backward(1)
        yield from forward(1)
        yield from backward(0)
    middle = (from_edge + 1) // 2
    for n in range(from_edge + 1):
        yield from backward(1, split=n > middle or (n == middle and from_edge % 2 == 1))
        yield from backward(0, split=n >= middle)
    for _ in range(to_middle):
        yield waiting.pop(0)
        yield from backward(0, split=True)
    yield from waiting


def _dualpipe_requires(shape: PipelineShape) -> str | None:
    if reason := _pairs_of_submeshes(shape):
        return reason
    least, m = 2 * shape.num_submeshes, shape.num_microbatches
    if m % 2 or m < least:
        return f"needs an even number of microbatches, at least {least} on {shape.num_submeshes} submeshes; got {m}"
    return None


def _pairs_of_submeshes(shape: PipelineShape) -> str | None:
    """The requirement that stages have a submesh in each direction."""
    if shape.virtual != 1:
        return f"puts each stage on two submeshes by itself: leave virtual=1, not {shape.virtual}"
    if shape.num_submeshes % 2:
        return (
            f"pairs submeshes from both ends, so it needs an even number of them; got {shape.num_submeshes}. Take one"
            " more or one fewer, or schedule='1f1b'"
        )
    return None


def _chimera_bubble_s(even: EvenPipeline) -> float:
    return (even.shape.num_submeshes - 2) * even.forward_s


def _chimera_objective(num_microbatches: int, virtual: int) -> Objective:
    """With equal stages and F = B = t / 2, the makespan is m t + (p - 2) t / 2 and both updates. A submesh runs the
    microbatches half on one stage, half on another; the objective has the slower of the two for all."""

    def in_flight(after: int, num_submeshes: int) -> float:
        return _chimera_in_flight(PipelineShape(num_submeshes, num_microbatches))[num_submeshes - 1 - after]

    return Objective(
        once_s=lambda cost: cost.pass_s / 2,
        repeated_s=lambda cost: (num_microbatches - 1) * cost.pass_s + 2 * cost.update_s,
        in_flight=in_flight,
        transfer_once=0.5,
        transfer_repeated=num_microbatches - 1,
    )


def _dualpipe_bubble_s(even: EvenPipeline) -> float:
    return (even.shape.num_submeshes // 2 - 1) * (even.forward_s + even.backward_s - 2 * even.weight_s)


def _dualpipe_holds(even: EvenPipeline) -> bool:
    return even.weight_s <= even.input_s <= even.forward_s <= even.backward_s


def _dualpipe_objective(num_microbatches: int, virtual: int) -> Objective:
    """With equal stages of t = F + B, the makespan is m t + (p / 2 - 1)(F + B - 2W) and both updates."""

    def filling_s(cost: StageCost) -> float:
        return np.maximum(0.0, cost.forward_s + cost.backward_s - cost.weight_s)

    return Objective(
        once_s=lambda cost: filling_s(cost) / 2,
        repeated_s=lambda cost: num_microbatches * cost.pass_s - filling_s(cost) + 2 * cost.update_s,
        in_flight=lambda after, num_submeshes: num_submeshes + 1,
        transfer_once=0.5,
        transfer_repeated=num_microbatches - 1,
    )


CHIMERA = ScheduleKind(
    name="chimera",
    description="Two pipelines of the same stages in opposite directions fill each other's idle time.",
    orders=_chimera,
    requires=_chimera_requires,
    bubble="(p - 2)F",
    where="F = B and m is a multiple of p",
    bubble_s=_chimera_bubble_s,
    holds=lambda even: even.forward_s == even.backward_s and is_in_whole_rounds(even),
    in_flight=_chimera_in_flight,
    placement=both_ways,
    objective=_chimera_objective,
)

DUALPIPE = ScheduleKind(
    name="dualpipe",
    description="Two pipelines in opposite directions with a split backward pass; weight parts fill the end.",
    orders=_dualpipe,
    backward="split",
    requires=_dualpipe_requires,
    bubble="(p / 2 - 1)(F + B - 2W)",
    where="W no longer than B - W, which is no longer than F, which is no longer than B",
    bubble_s=_dualpipe_bubble_s,
    holds=_dualpipe_holds,
    in_flight=lambda shape: (shape.num_submeshes + 1,) * shape.num_submeshes,
    placement=both_ways,
    objective=_dualpipe_objective,
)
