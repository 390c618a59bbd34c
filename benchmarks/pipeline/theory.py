"""Compare the schedule simulator with the published formulas, in whole numbers, so that equality is exact.

The grid has every schedule, 2 to 16 submeshes and 1 to 64 microbatches. A case is a shape with durations of forward
pass, input part and weight part, equal on all stages, and transfers that take no time. The idle time is compared on
every submesh. p is the number of submeshes, m of microbatches, v of stages per submesh (2 to 4 if a schedule has
several); F and B are a submesh's times for the forward and the whole backward pass of one microbatch, and W is the
weight part of B. Every shape has one more case with random durations of tasks and transfers. In all cases, the makespan
must equal the longest path through the dependences. The maximum in flight is counted in microbatches times stages.

With F = 1 and B = 2W = 2, the formula of zb-h1 is a step of exactly 3m + p - 1 slots, JaxPP's grid. Its last row is no
published formula: it is the simulator's result if W is longer than that formula allows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar.pipeline.schedule.in_flight import peak_held
from autopar.pipeline.schedule.kind import EvenPipeline, PipelineShape, ScheduleKind
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import SCHEDULES, build, unmet
from autopar.pipeline.schedule.tasks import Schedule, Task
from benchmarks.pipeline.critical_path import longest_path

STAGES = range(2, 17)
MICROBATCHES = range(1, 65)
VIRTUAL = (1, 2, 3, 4)
#: Durations on one stage: forward pass, input part, weight part. In the third, the weight part is the longest; in the last,
#: both passes are equally long.
DURATIONS = ((1, 1, 1), (3, 4, 2), (2, 1, 3), (3, 2, 1))
#: ZB-H1 for any weight part.
_ANY_WEIGHT_PART = replace(
    SCHEDULES["zb-h1"],
    bubble="(p - 1) max(F, B - W, F + B - 2W)",
    where="m of at least p",
    bubble_s=lambda even: (
        (even.shape.num_submeshes - 1)
        * max(even.forward_s, even.input_s, even.forward_s + even.input_s - even.weight_s)
    ),
    holds=lambda even: even.shape.num_microbatches >= even.shape.num_submeshes,
)


def measure() -> list[dict[str, Any]]:
    """A row for each formula."""
    return [_row(kind) for kind in (*SCHEDULES.values(), _ANY_WEIGHT_PART)]


def shapes(kind: ScheduleKind) -> Iterator[PipelineShape]:
    """The shapes of the grid that a schedule is defined for."""
    for num_submeshes in STAGES:
        for num_microbatches in MICROBATCHES:
            for virtual in VIRTUAL:
                shape = PipelineShape(num_submeshes, num_microbatches, virtual)
                if unmet(kind, shape) is None:
                    yield shape


def seconds_of(even: EvenPipeline, task: Task) -> int:
    """A task's duration in an even pipeline; updates take no time."""
    whole = {
        "forward": even.forward_s,
        "backward": even.backward_s,
        "input": even.input_s,
        "weight": even.weight_s,
        "update": 0,
    }
    return int(whole[task.phase])


def _row(kind: ScheduleKind) -> dict[str, Any]:
    """Counts over all cases of a schedule."""
    counted = Counter[str]()
    assert kind.bubble_s is not None
    for shape in shapes(kind):
        built = build(SCHEDULES[kind.name], shape.num_submeshes, shape.num_microbatches, virtual=shape.virtual)
        counted["shapes"] += 1
        assert kind.in_flight is not None
        counted["in flight"] += peak_held(built, lambda stage: 1) == kind.in_flight(shape)
        for durations in DURATIONS:
            even = EvenPipeline(shape, *durations)
            timeline = simulate(built, lambda task, even=even: seconds_of(even, task))
            length, _ = longest_path(built, lambda task, even=even: seconds_of(even, task))
            where = "holds" if kind.holds(even) else "elsewhere"
            counted[where] += 1
            counted[f"equal, {where}"] += set(timeline.idle_s) == {kind.bubble_s(even)}
            counted["cases"] += 1
            counted["longest path"] += timeline.makespan_s == length
        counted["cases"] += 1
        counted["longest path"] += _equal_at_random(built, shape)
    return {
        "schedule": kind.name,
        "idle time of a submesh": kind.bubble,
        "holds": kind.where,
        "shapes": counted["shapes"],
        "equal where it holds": f"{counted['equal, holds']} of {counted['holds']}",
        "equal elsewhere": f"{counted['equal, elsewhere']} of {counted['elsewhere']}",
        "makespan = longest path": f"{counted['longest path']} of {counted['cases']}",
        "most in flight as published": f"{counted['in flight']} of {counted['shapes']}",
    }


def _equal_at_random(schedule: Schedule, shape: PipelineShape) -> bool:
    """Whether makespan and longest path agree for random durations of tasks and transfers."""
    draw = random.Random(f"{schedule.name} {shape}")
    seconds = {task: draw.randrange(20) for task in schedule.tasks}
    delays: dict[tuple[Task, Task], int] = {}

    def transfer_s(source: Task, target: Task) -> int:
        return delays.setdefault((source, target), draw.randrange(10))

    timeline = simulate(schedule, seconds.__getitem__, transfer_s)
    return timeline.makespan_s == longest_path(schedule, seconds.__getitem__, transfer_s)[0]
