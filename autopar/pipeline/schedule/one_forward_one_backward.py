"""Order tasks by 1F1B (PipeDream-Flush, Narayanan et al., 2021) and interleaved 1F1B (Megatron-LM, Narayanan et al.,
2021).

After a warm-up, each submesh alternates between forward and backward passes, so the in-flight microbatches do not
exceed the pipeline's depth. In the interleaved schedule, a submesh has several stages that are far apart in the
program. The pipeline fills sooner, because stages are shorter, but more microbatches are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.tasks import Orders, Task


def _one_stage_each(shape: PipelineShape) -> Orders:
    p, m = shape.num_submeshes, shape.num_microbatches
    return tuple(
        _alternating(
            [Task(stage, microbatch, "forward") for microbatch in range(m)],
            [Task(stage, microbatch, "backward") for microbatch in range(m)],
            warm_up=p - 1 - stage,
        )
        for stage in range(p)
    )


def _several_stages_each(shape: PipelineShape) -> Orders:
    """Megatron's order: rounds of one microbatch per submesh, through all of a submesh's stages."""
    p, v = shape.num_submeshes, shape.virtual
    orders = []
    for submesh in range(p):
        rounds = [
            (stage, microbatch)
            for first in range(0, shape.num_microbatches, p)
            for stage in range(submesh, p * v, p)
            for microbatch in range(first, first + p)
        ]
        forward = [Task(stage, microbatch, "forward") for stage, microbatch in rounds]
        # Backward passes run the same rounds through the stages in reverse.
        backward = [
            Task(submesh + (v - 1) * p - (stage - submesh), microbatch, "backward") for stage, microbatch in rounds
        ]
        orders.append(_alternating(forward, backward, warm_up=_interleaved_warm_up(shape, submesh)))
    return tuple(orders)


def _interleaved_warm_up(shape: PipelineShape, submesh: int) -> int:
    return (shape.virtual - 1) * shape.num_submeshes + 2 * (shape.num_submeshes - 1 - submesh)


def _alternating(forward: Sequence[Task], backward: Sequence[Task], warm_up: int) -> tuple[Task, ...]:
    """Warm-up of forward passes, then alternating forward and backward passes, then the remaining backward passes."""
    first = min(warm_up, len(forward))
    steady = [task for pair in zip(forward[first:], backward, strict=False) for task in pair]
    return (*forward[:first], *steady, *backward[len(forward) - first :])


def _whole_rounds(shape: PipelineShape) -> str | None:
    p, m = shape.num_submeshes, shape.num_microbatches
    if shape.virtual < 2:
        return "needs at least two stages on each submesh, not one: set virtual=2 or more, or take schedule='1f1b'"
    if m % p:
        below = f"{m // p * p} or " if m > p else ""
        return (
            f"runs in rounds of one microbatch for each of its {p} submeshes, and {m} microbatches are not a whole"
            f" number of rounds: choose {below}{(m // p + 1) * p} microbatches, or schedule='1f1b', which takes any number"
        )
    return None


ONE_F_ONE_B = ScheduleKind(
    name="1f1b",
    description="Forward and backward by turns: as quick as gpipe, with only as many microbatches held as there are stages.",
    orders=_one_stage_each,
    requires=one_stage_each,
    bubble="(p - 1)(F + B)",
    bubble_s=lambda even: even.filling_and_draining_s,
    in_flight=lambda shape: tuple(
        min(shape.num_submeshes - submesh, shape.num_microbatches) for submesh in range(shape.num_submeshes)
    ),
)
INTERLEAVED = ScheduleKind(
    name="interleaved",
    description="1f1b with several stages on each submesh: idle time shrinks as often, for more transfers and more memory.",
    orders=_several_stages_each,
    requires=_whole_rounds,
    bubble="(p - 1)(F + B) / v",
    where="m a multiple of p, the only numbers it takes",
    bubble_s=lambda even: even.filling_and_draining_s,
    in_flight=lambda shape: tuple(
        min(_interleaved_warm_up(shape, submesh) + 1, shape.virtual * shape.num_microbatches)
        for submesh in range(shape.num_submeshes)
    ),
)
