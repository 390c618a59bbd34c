"""What a schedule keeps in memory: forward passes whose backward pass has not ended.

In: a `Schedule`, what each stage keeps of a microbatch. Out: the most of it at once. A submesh runs its tasks one after
another, so that this is read off their order: no duration changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autopar.pipeline.schedule.tasks import Schedule, Task


def in_flight(schedule: Schedule) -> tuple[dict[int, int], ...]:
    """Of each submesh, by stage: the most microbatches held at once.

    One is held from the start of its forward pass to the end of its backward pass or weight part; where it has none, to
    the end of its forward pass.
    """
    most: list[dict[int, int]] = []
    for order in schedule.orders:
        ended_by = _last_parts(order)
        held, peak = Counter[int](), dict[int, int]()
        for task in order:
            held[task.stage] += task.phase == "forward"
            peak[task.stage] = max(peak.get(task.stage, 0), held[task.stage])
            held[task.stage] -= task in ended_by
        most.append(peak)
    return tuple(most)


def held_most(
    schedule: Schedule, held: Callable[[int], float], held_after_input: Callable[[int], float] | None = None
) -> tuple[float, ...]:
    """Of each submesh, the most that its stages hold at once, all together; arguments as of `held_while`."""
    return tuple(max(while_each, default=0) for while_each in held_while(schedule, held, held_after_input))


def held_while(
    schedule: Schedule, held: Callable[[int], float], held_after_input: Callable[[int], float] | None = None
) -> tuple[tuple[float, ...], ...]:
    """Of each submesh, what its stages hold together while each of its tasks runs, in their order.

    Args:
        held: stage -> what one microbatch in flight holds, in bytes say.
        held_after_input: the same once the input part of its backward pass has ended, where that frees a part. None: the
            same as before.
    """
    found = []
    for order in schedule.orders:
        ended_by = _last_parts(order)
        now, while_each = 0, []
        holds: dict[tuple[int, int], float] = {}
        for task in order:
            one = task.stage, task.microbatch
            if task.phase == "forward":
                holds[one] = held(task.stage)
                now += holds[one]
            while_each.append(now)
            if task in ended_by:
                now -= holds.pop(one, 0)
            elif task.phase == "input" and held_after_input is not None and one in holds:
                left = held_after_input(task.stage)
                now += left - holds[one]
                holds[one] = left
        found.append(tuple(while_each))
    return tuple(found)


def _last_parts(order: tuple[Task, ...]) -> set[Task]:
    """The tasks of a submesh whose end frees a microbatch."""
    last: dict[tuple[int, int], Task] = {}
    for task in order:
        if task.phase != "update":
            last[task.stage, task.microbatch] = task
    return set(last.values())
