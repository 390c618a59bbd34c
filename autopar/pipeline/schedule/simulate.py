"""Simulate a schedule: compute the start and end of every task.

In: a `Schedule`, and the seconds of each task and each transfer.
Out: a `PipelineTimeline`. A submesh runs its tasks in order, each as soon as the previous one has ended and its inputs
have arrived. A transfer delays only the task that waits for it. The arithmetic is sums and maxima, so integers and
fractions stay exact.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span

Seconds = Callable[[Task], float]
#: (sending task, receiving task) -> seconds. Called only for tasks on different submeshes.
TransferSeconds = Callable[[Task, Task], float]


def no_transfer(source: Task, target: Task) -> float:
    """Zero seconds for every transfer."""
    return 0


def simulate(schedule: Schedule, seconds: Seconds, transfer_s: TransferSeconds = no_transfer) -> PipelineTimeline:
    """Compute the start and end of every task.

    Raises:
        ScheduleError: the schedule deadlocks, or a task depends on one that no submesh runs.
    """
    submesh_of = schedule.submesh_of()
    ended: dict[Task, float] = {}
    spans: list[Span] = []
    position = [0] * schedule.num_submeshes
    free_at: list[float] = [0] * schedule.num_submeshes
    waiting: dict[Task, list[int]] = {}  # submeshes whose next task waits for this one
    active = list(range(schedule.num_submeshes))
    while active:
        submesh = active.pop()
        order = schedule.orders[submesh]
        while position[submesh] < len(order):
            task = order[position[submesh]]
            needs = schedule.needs.get(task, ())
            missing = next((need for need in needs if need not in ended), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(submesh)
                break
            start = free_at[submesh]
            for need in needs:
                arrival = ended[need]
                if submesh_of[need] != submesh:
                    arrival += transfer_s(need, task)
                start = max(start, arrival)
            end = start + seconds(task)
            spans.append(Span(submesh, task, start, end))
            ended[task] = free_at[submesh] = end
            position[submesh] += 1
            active += waiting.pop(task, ())
    if len(spans) < sum(map(len, schedule.orders)):
        raise ScheduleError(_deadlock(schedule, position, ended, submesh_of))
    return PipelineTimeline(f"{schedule.name}, simulated", schedule.num_submeshes, tuple(spans))


def _deadlock(schedule: Schedule, position: list[int], ended: dict[Task, float], submesh_of: dict[Task, int]) -> str:
    """Describe a deadlock: follow each blocked task to the one it waits for until a submesh repeats."""
    stuck = next(s for s, order in enumerate(schedule.orders) if position[s] < len(order))
    path: list[int] = []
    steps: dict[int, str] = {}
    while stuck not in steps:
        head = schedule.orders[stuck][position[stuck]]
        need = next(n for n in schedule.needs[head] if n not in ended)
        if need not in submesh_of:
            return (
                f"schedule {schedule.name!r} cannot run: the {head}, next on submesh {stuck}, waits for the {need},"
                " which no submesh runs. Put every task that another one waits for into the order of a submesh"
            )
        on = submesh_of[need]
        behind = schedule.orders[on][position[on]]
        steps[stuck] = f"on submesh {stuck}, the {head} waits for the {need}"
        if behind != need:
            steps[stuck] += f", which submesh {on} runs after the {behind}"
        path.append(stuck)
        stuck = on
    circle = "; ".join(steps[submesh] for submesh in path[path.index(stuck) :])
    return (
        f"schedule {schedule.name!r} deadlocks: {circle}. A submesh runs its tasks in the given order: move tasks that"
        " others wait for to the front"
    )
