"""Simulate a schedule: compute the start and end of every task.

In: a `Schedule`, the seconds of each task and each transfer, and the links that each transfer uses.
Out: a `PipelineTimeline`. A submesh runs its tasks in order, each as soon as the previous one has ended and its inputs
have arrived. A transfer starts when its value is ready and all its links are free, holds them to its end, and delays
only the tasks that wait for it. A link serves transfers in the order in which their values are ready, one at a time; a
link is one direction of a full-duplex connection, so it has its own name. Ties go to the lower submesh that sends, then
to the nearest stage. The arithmetic is sums and maxima, so integers and fractions stay exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span

Seconds = Callable[[Task], float]
#: (sending task, receiving task) -> seconds. Called only for tasks on different submeshes.
TransferSeconds = Callable[[Task, Task], float]
#: Links by any names.
Names = Sequence[Hashable]
#: (sending task, receiving task) -> the links that the transfer holds. Called as `TransferSeconds` is.
Links = Callable[[Task, Task], Names]


def no_transfer(source: Task, target: Task) -> float:
    """Zero seconds for every transfer."""
    return 0


def no_links(source: Task, target: Task) -> tuple[()]:
    """Links without limits: transfers do not slow each other down."""
    return ()


def simulate(
    schedule: Schedule,
    seconds: Seconds,
    transfer_s: TransferSeconds = no_transfer,
    links: Links = no_links,
    at_start: Iterable[tuple[Task, float, Names]] = (),
) -> PipelineTimeline:
    """Compute the start and end of every task.

    Args:
        at_start: transfers of what exists before the step: the task that waits for it, its seconds, its links.

    Raises:
        ScheduleError: the schedule deadlocks, or a task depends on one that no submesh runs.
    """
    wiring = schedule.wiring
    tasks, orders, users, submesh_of = wiring.tasks, wiring.orders, wiring.users, wiring.submesh
    missing = list(wiring.num_needs)  # inputs of a task that are not computed yet
    arrived: list[float] = [0] * len(tasks)  # the last input that is known
    link_free_at: dict[Hashable, float] = {}
    spans: list[Span] = []
    position = [0] * len(orders)
    free_at: list[float] = [0] * len(orders)
    idle = [True] * len(orders)
    running: list[tuple[float, int, int]] = []  # a heap: end, submesh, task

    def arrive(user: int, ready: float, taken: float, held: Names) -> None:
        for link in held:
            ready = max(ready, link_free_at.get(link, 0))
        ready += taken
        for link in held:
            link_free_at[link] = ready
        arrived[user] = max(arrived[user], ready)

    def start_next(submesh: int) -> None:
        order, at = orders[submesh], position[submesh]
        if not idle[submesh] or at == len(order) or missing[order[at]]:
            return
        n = order[at]
        start = max(free_at[submesh], arrived[n])
        end = start + seconds(tasks[n])
        spans.append(Span(submesh, tasks[n], start, end))
        idle[submesh] = False
        heapq.heappush(running, (end, submesh, n))

    for user, taken, held in at_start:
        arrive(tasks.index(user), 0, taken, held)
    for submesh in range(len(orders)):
        start_next(submesh)
    while running:
        end, submesh, n = heapq.heappop(running)
        free_at[submesh], idle[submesh] = end, True
        position[submesh] += 1
        for user in users[n]:
            there = submesh_of[user]
            if there != submesh:
                ends = tasks[n], tasks[user]
                arrive(user, end, transfer_s(*ends), links(*ends))
            missing[user] -= 1
            if not missing[user]:
                start_next(there)
        start_next(submesh)
    if len(spans) < len(tasks):
        raise ScheduleError(_deadlock(schedule, position, {span.task for span in spans}, schedule.submesh_of()))
    return PipelineTimeline(f"{schedule.name}, simulated", schedule.num_submeshes, tuple(spans))


def _deadlock(schedule: Schedule, position: list[int], ended: set[Task], submesh_of: dict[Task, int]) -> str:
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
