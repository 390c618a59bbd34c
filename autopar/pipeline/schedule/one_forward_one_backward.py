"""Order tasks by 1F1B (PipeDream-Flush, Narayanan et al., 2021) and interleaved 1F1B (Megatron-LM, Narayanan et al.,
2021).

After a warm-up, each submesh alternates between forward and backward passes, so the in-flight microbatches do not
exceed the pipeline's depth. In the interleaved schedule, a submesh has several stages that are far apart in the
program. The pipeline fills sooner, because stages are shorter, but more microbatches are in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.pipeline.schedule.kind import EvenPipeline, PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.objective import Objective
from autopar.pipeline.schedule.tasks import Orders, Phase, Task


def _one_stage_each(shape: PipelineShape) -> Orders:
    p, m = shape.num_submeshes, shape.num_microbatches
    return tuple(
        alternating(
            [Task(stage, microbatch, "forward") for microbatch in range(m)],
            [Task(stage, microbatch, "backward") for microbatch in range(m)],
            warm_up=p - 1 - stage,
        )
        for stage in range(p)
    )


def rounds(shape: PipelineShape) -> list[range]:
    """The microbatches of each round of an interleaved schedule: at least as many as submeshes, where there are as many.

    >>> rounds(PipelineShape(2, 5, 2))
    [range(0, 3), range(3, 5)]
    """
    m = shape.num_microbatches
    count = max(1, m // shape.num_submeshes)
    ends = [0, *itertools.accumulate(m // count + (n < m % count) for n in range(count))]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def in_rounds(shape: PipelineShape, submesh: int, phase: Phase) -> list[Task]:
    """The forward passes of a submesh, round by round through all of its stages, or its backward passes, through the
    stages in reverse."""
    stages = range(submesh, shape.num_submeshes * shape.virtual, shape.num_submeshes)
    through = stages if phase == "forward" else reversed(stages)
    each = list(through)
    return [Task(stage, microbatch, phase) for one in rounds(shape) for stage in each for microbatch in one]


def _several_stages_each(shape: PipelineShape) -> Orders:
    """Megatron's order."""
    return tuple(
        alternating(
            in_rounds(shape, submesh, "forward"),
            in_rounds(shape, submesh, "backward"),
            warm_up=_interleaved_warm_up(shape, submesh),
        )
        for submesh in range(shape.num_submeshes)
    )


def _interleaved_warm_up(shape: PipelineShape, submesh: int) -> int:
    return (shape.virtual - 1) * len(rounds(shape)[0]) + 2 * (shape.num_submeshes - 1 - submesh)


def alternating(forward: Sequence[Task], backward: Sequence[Task], warm_up: int) -> tuple[Task, ...]:
    """Warm-up of forward passes, then alternating forward and backward passes, then the remaining backward passes."""
    first = min(warm_up, len(forward))
    steady = [task for pair in zip(forward[first:], backward, strict=False) for task in pair]
    return (*forward[:first], *steady, *backward[len(forward) - first :])


def several_stages_each(shape: PipelineShape) -> str | None:
    """The requirement that each submesh has at least two stages."""
    if shape.virtual > 1:
        return None
    return "needs at least two stages on each submesh, not one: set virtual=2 or more, or take schedule='1f1b'"


def is_in_whole_rounds(even: EvenPipeline) -> bool:
    """Whether every round has one microbatch for each submesh."""
    return even.shape.num_microbatches % even.shape.num_submeshes == 0


def _answered(num_microbatches: int, virtual: int) -> Objective:
    """A stage waits for its neighbor's answer, and has a microbatch in flight for itself and one for each later stage."""
    repeats = num_microbatches - 1
    return Objective(
        once_s=lambda cost: cost.pass_s,
        repeated_s=lambda cost: repeats * cost.pass_s + cost.update_s,
        in_flight=lambda after, num_submeshes: min(after + 1, num_microbatches),
        transfer_repeated=repeats,
    )


def _answered_in_turn(num_microbatches: int, virtual: int) -> Objective:
    """Costs are those of virtual stages. With equal ones, the makespan is p t / v + (m v - 1) t / v."""
    repeats = num_microbatches * virtual - 1

    def in_flight(after: int, num_submeshes: int) -> float:
        shape = PipelineShape(num_submeshes, num_microbatches, virtual)
        return _most_in_flight(shape)[num_submeshes - 1 - after]

    return Objective(
        once_s=lambda cost: cost.pass_s / virtual,
        repeated_s=lambda cost: repeats * cost.pass_s + virtual * cost.update_s,
        in_flight=in_flight,
        transfer_once=1 / virtual,
        transfer_repeated=repeats,
    )


def _most_in_flight(shape: PipelineShape) -> tuple[int, ...]:
    most = shape.virtual * shape.num_microbatches
    return tuple(min(_interleaved_warm_up(shape, submesh) + 1, most) for submesh in range(shape.num_submeshes))


ONE_F_ONE_B = ScheduleKind(
    name="1f1b",
    description="Alternates forward and backward passes: as fast as gpipe, with no more microbatches in flight than stages.",
    orders=_one_stage_each,
    requires=one_stage_each,
    bubble="(p - 1)(F + B)",
    bubble_s=lambda even: even.filling_and_draining_s,
    in_flight=lambda shape: tuple(
        min(shape.num_submeshes - submesh, shape.num_microbatches) for submesh in range(shape.num_submeshes)
    ),
    objective=_answered,
    is_searched=True,
)
INTERLEAVED = ScheduleKind(
    name="interleaved",
    description="1f1b with several stages per submesh: divides the idle time by their number, for more transfers and memory.",
    orders=_several_stages_each,
    requires=several_stages_each,
    bubble="(p - 1)(F + B) / v",
    where="m a multiple of p",
    bubble_s=lambda even: even.filling_and_draining_s,
    holds=is_in_whole_rounds,
    in_flight=_most_in_flight,
    virtuals=(2, 3, 4),
    objective=_answered_in_turn,
    is_searched=True,
)
