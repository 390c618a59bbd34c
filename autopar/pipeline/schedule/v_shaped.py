"""Order tasks of stages that go down the submeshes and up again: ZB-V (Zero Bubble Pipeline Parallelism, Qi et al., 2023)
and DualPipeV (DualPipe, DeepSeek-AI, 2025, in the cut-in-half form of Qi et al.).

Submesh i has the stages i and 2p - 1 - i, so the last submesh has the middle of the program, and the first submesh both
ends: the loss is known where the first stage is. Backward passes are split; a submesh fills its idle time with weight parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind, down_and_up
from autopar.pipeline.schedule.objective import Objective, StageCost
from autopar.pipeline.schedule.tasks import Orders, Phase, Task

Step = tuple[int, Phase]


def numbered(steps: Iterable[Step], num_microbatches: int) -> tuple[Task, ...]:
    """Tasks of which each stage and phase takes the next microbatch; steps beyond the last microbatch are left out.

    >>> [str(task) for task in numbered([(0, "forward"), (1, "forward"), (0, "forward")], 1)]
    ['forward of microbatch 0 on stage 0', 'forward of microbatch 0 on stage 1']
    """
    count, found = Counter[Step](), list[Task]()
    for stage, phase in steps:
        if count[stage, phase] < num_microbatches:
            found.append(Task(stage, count[stage, phase], phase))
        count[stage, phase] += 1
    return tuple(found)


def _forward(stage: int) -> Step:
    return stage, "forward"


def _input(stage: int) -> Step:
    return stage, "input"


def _weight(stage: int) -> Step:
    return stage, "weight"


def _zero_bubble(shape: PipelineShape) -> Orders:
    p, m = shape.num_submeshes, shape.num_microbatches

    def steps(i: int) -> Iterator[Step]:
        down, up = i, 2 * p - 1 - i
        whole_up = [_forward(up), _input(up), _weight(up)]
        yield from [_forward(down)] * (2 * (p - i) - 1)
        yield from [_forward(up), _forward(down)] * i
        yield from whole_up * (p - i)
        # Fewer microbatches than fill the pipeline leave out some of its steps.
        steady = max(m, 2 * p - 1) - p
        yield from [_forward(down), _input(down), _weight(down), *whole_up] * steady
        yield from [_input(down), _input(up)] * i
        yield from [_input(down), _weight(down)] * (p - i)
        yield from [_weight(up)] * i
        yield from [_weight(down)] * i

    return tuple(numbered(steps(i), m) for i in range(p))


def _dual_pipe(shape: PipelineShape) -> Orders:
    p, m = shape.num_submeshes, shape.num_microbatches

    def steps(i: int) -> Iterator[Step]:
        down, up = i, 2 * p - 1 - i
        back_down = [_input(down), _weight(down)]
        back_up = [_input(up), _weight(up)]
        yield from [_forward(down)] * (2 * (p - i - 1))
        yield from [_forward(down), _forward(up)] * (i + 1)
        yield from [*back_up, _forward(up)] * (p - i - 1)
        yield from [_forward(down), *back_up, _forward(up), *back_down] * (m - 2 * p + i + 1)
        yield from [*back_up, _forward(up), *back_down] * (p - i - 1)
        # Half of the remaining gradients go up at once; their weight parts wait until the submesh would idle.
        ends = [up, down] * (i + 1)
        for stage in ends[: i + 1]:
            yield from back_up if stage == up else back_down
        yield from [_input(stage) for stage in ends[i + 1 :]]
        waiting = [*ends[i + 1 :], *[down] * (p - i - 1)]
        for stage in waiting[: p - i - 1]:
            yield from [_weight(stage), _input(down)]
        yield from [_weight(stage) for stage in waiting[p - i - 1 :]]

    return tuple(numbered(steps(i), m) for i in range(p))


def _two_stages_each(shape: PipelineShape) -> str | None:
    if shape.virtual == 2:
        return None
    return f"has two stages on each submesh, not {shape.virtual}: ask for twice as many stages as submeshes"


def _enough_microbatches(shape: PipelineShape) -> str | None:
    least = 2 * shape.num_submeshes
    if shape.num_microbatches >= least or shape.virtual != 2:
        return _two_stages_each(shape)
    return (
        f"needs at least two microbatches for each of its {shape.num_submeshes} submeshes, not {shape.num_microbatches}:"
        f" choose {least} or more, or schedule='zb-v', which takes any number"
    )


def _zero_bubble_in_flight(shape: PipelineShape) -> tuple[int, ...]:
    p, m = shape.num_submeshes, shape.num_microbatches
    return tuple(min(2 * p, 2 * m, m + 1 + submesh) for submesh in range(p))


def _objective(num_microbatches: int, most: Callable[[int], int]) -> Objective:
    """With equal stages and F = I = W of a virtual stage, the makespan is 2 m (F + I + W) + (p - 1) F.

    Args:
        most: the peak of in-flight microbatches, by the number of submeshes.
    """

    def once(cost: StageCost) -> float:
        return cost.pass_s / 6  # half of a part, and there are 2p stages

    return Objective(
        once_s=once,
        repeated_s=lambda cost: 2 * (num_microbatches * cost.pass_s - once(cost) + cost.update_s),
        in_flight=lambda after, num_submeshes: min(most(num_submeshes), 2 * num_microbatches),
        transfer_once=0.5,
        transfer_repeated=2 * num_microbatches - 1,
    )


ZB_V = ScheduleKind(
    name="zb-v",
    description="Stages go down the submeshes and up again, with a split backward pass: hardly any idle time in 1f1b's memory.",
    orders=_zero_bubble,
    backward="split",
    requires=_two_stages_each,
    bubble="(p - 1)F / v",
    where="F, W and the rest of B equal, m of at least 2p - 1",
    bubble_s=lambda even: even.filling_s,
    holds=lambda even: even.has_equal_parts and even.shape.num_microbatches >= 2 * even.shape.num_submeshes - 1,
    in_flight=_zero_bubble_in_flight,
    placement=down_and_up,
    virtuals=(2,),
    objective=lambda num_microbatches, virtual: _objective(num_microbatches, lambda p: 2 * p),
    is_searched=True,
    in_planned_order=True,
)
DUALPIPE_V = ScheduleKind(
    name="dualpipe-v",
    description="As zb-v, but in the steady state one stage's forward pass alternates with the other's backward pass.",
    orders=_dual_pipe,
    backward="split",
    requires=_enough_microbatches,
    bubble="(p - 1)F / v",
    where="F, W and the rest of B equal, m of at least 2p, the only numbers it takes",
    bubble_s=lambda even: even.filling_s,
    holds=lambda even: even.has_equal_parts,
    in_flight=lambda shape: (2 * shape.num_submeshes + 1,) * shape.num_submeshes,
    placement=down_and_up,
    virtuals=(2,),
    objective=lambda num_microbatches, virtual: _objective(num_microbatches, lambda p: 2 * p + 1),
)
