"""Verify that a schedule is legal.

In: a `Schedule`.
Out: nothing, or a `ScheduleError` that names the tasks. Every schedule is checked when it is built, so that the author
of a new one sees its errors at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.tasks import Phase, Schedule, Task

#: The sets of phases that a stage may run for a microbatch.
_WHOLE: tuple[frozenset[Phase], ...] = (
    frozenset({"forward"}),
    frozenset({"forward", "backward"}),
    frozenset({"forward", "input", "weight"}),
)


def check(schedule: Schedule) -> None:
    """Check that every stage runs every microbatch once, each backward pass on its forward pass's submesh, without
    deadlock.

    Raises:
        ScheduleError: the schedule violates one of these rules.
    """
    twice = [task for task, count in Counter(schedule.tasks).items() if count > 1]
    if twice:
        raise ScheduleError(
            f"schedule {schedule.name!r} runs the {twice[0]} {_times(schedule, twice[0])}; each task runs once"
        )
    phases = defaultdict[tuple[int, int], set[Phase]](set)
    places = defaultdict[tuple[int, int], set[int]](set)
    for task, submesh in schedule.submesh_of().items():
        if task.phase != "update":
            phases[task.stage, task.microbatch].add(task.phase)
            places[task.stage, task.microbatch].add(submesh)
    trains = any(phase != "forward" for found in phases.values() for phase in found)
    num_microbatches = schedule.num_microbatches
    for stage in range(schedule.num_stages):
        for microbatch in range(num_microbatches):
            _check_one(schedule, stage, microbatch, phases[stage, microbatch], places[stage, microbatch], trains)
    simulate(schedule, lambda task: 1)


def check_replicas(schedule: Schedule) -> None:
    """Check that a schedule can run with replicas of stages: all stages have equally many, and each microbatch runs on the
    same replica of every stage.

    Raises:
        ScheduleError: it cannot run.
    """
    microbatches: set[tuple[tuple[int, ...], ...]] = set()
    for stage, submeshes in enumerate(schedule.replicas):
        on = [[m for m in range(schedule.num_microbatches) if schedule.place_of[stage, m] == one] for one in submeshes]
        microbatches.add(tuple(map(tuple, on)))
    if len(microbatches) > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} divides the microbatches otherwise among the submeshes of one stage than among those"
            " of another: to run, it must have equally many submeshes for each stage, and the same microbatches together"
        )


def _check_one(
    schedule: Schedule, stage: int, microbatch: int, phases: set[Phase], places: set[int], trains: bool
) -> None:
    if phases not in _WHOLE or trains == (phases == {"forward"}):
        has = " and ".join(sorted(phases)) or "nothing"
        wants = "forward and backward, or forward, input and weight" if trains else "forward"
        raise ScheduleError(
            f"schedule {schedule.name!r} runs {has} of microbatch {microbatch} on stage {stage}, which needs {wants}:"
            " every stage runs every microbatch, whole"
        )
    if len(places) > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} runs microbatch {microbatch} of stage {stage} on submeshes"
            f" {' and '.join(map(str, sorted(places)))}; a backward pass must run on the submesh of its forward pass,"
            " which holds its activations"
        )


def _times(schedule: Schedule, task: Task) -> str:
    at = [submesh for submesh, order in enumerate(schedule.orders) for one in order if one == task]
    return f"{len(at)} times, on submesh {' and '.join(map(str, sorted(set(at))))}"
