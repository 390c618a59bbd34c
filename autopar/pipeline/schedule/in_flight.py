"""Compute the peak of in-flight microbatches and of stashed activations of a schedule.

In: a `Schedule`, and the bytes that each stage stashes per microbatch.
Out: the peak of each submesh. A submesh runs its tasks in order, so the peak does not depend on durations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from autopar.pipeline.schedule.objective import StageCost
from autopar.pipeline.schedule.tasks import Schedule, Task


def in_flight(schedule: Schedule) -> tuple[dict[int, int], ...]:
    """For each submesh and stage, the peak number of in-flight microbatches.

    A microbatch is in flight from the start of its forward pass to the end of its backward pass or weight part; without
    a backward pass, to the end of its forward pass.
    """
    peaks: list[dict[int, int]] = []
    for order in schedule.orders:
        ended_by = _last_parts(order)
        held, peak = Counter[int](), dict[int, int]()
        for task in order:
            held[task.stage] += task.phase == "forward"
            peak[task.stage] = max(peak.get(task.stage, 0), held[task.stage])
            held[task.stage] -= task in ended_by
        peaks.append(peak)
    return tuple(peaks)


def most_in_flight(schedule: Schedule) -> tuple[float, ...]:
    """For each submesh, the peak number of in-flight microbatches of all its stages together."""
    return peak_held(schedule, lambda stage: 1)


def peak_held(
    schedule: Schedule,
    held: Callable[[int], float],
    held_after_input: Callable[[int], float] | None = None,
    made_by_input: Callable[[int], float] | None = None,
) -> tuple[float, ...]:
    """The peak amount that the stages of each submesh hold together. The arguments are those of `held_during_tasks`."""
    amounts = held_during_tasks(schedule, held, held_after_input, made_by_input)
    return tuple(max(during_tasks, default=0) for during_tasks in amounts)


def bytes_during_tasks(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[tuple[float, ...], ...]:
    """The bytes of in-flight microbatches that a device of each submesh holds during each of its tasks, in task order. After
    the last microbatch of a stage with replicas, they include the accumulators that it gets from the others.

    Args:
        costs: the cost of each stage.
    """
    part = 1 / len(schedule.shares)
    in_flight = held_during_tasks(
        schedule,
        lambda stage: part * costs[stage].flight_bytes,
        lambda stage: part * (costs[stage].kept_bytes + costs[stage].passed_bytes),
        lambda stage: part * costs[stage].passed_bytes,
    )
    if schedule.num_replicas == 1:
        return in_flight
    arrived = [_received_bytes(schedule, order, costs) for order in schedule.orders]
    return tuple(tuple(map(sum, zip(*both, strict=True))) for both in zip(in_flight, arrived, strict=True))


def _received_bytes(schedule: Schedule, order: tuple[Task, ...], costs: Sequence[StageCost]) -> list[float]:
    """The bytes of other replicas' accumulators during each task of a submesh. The replicas of a stage end its microbatches
    at about the same time."""
    last = {task.stage: n for n, task in enumerate(order) if task.phase != "update"}
    others = {stage: len(schedule.replicas[stage]) - 1 for stage in last}
    return [
        sum(others[stage] * costs[stage].accumulated_bytes for stage, end in last.items() if end < n)
        for n in range(len(order))
    ]


def held_during_tasks(
    schedule: Schedule,
    held: Callable[[int], float],
    held_after_input: Callable[[int], float] | None = None,
    made_by_input: Callable[[int], float] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """The amount that the stages of each submesh hold together during each of its tasks, in task order.

    Args:
        held: the amount that one in-flight microbatch of a stage holds, for example in bytes.
        held_after_input: the amount after the input part of its backward pass; None if that part frees nothing.
        made_by_input: the amount that the input part makes, in addition to what it frees when it ends.
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
            made = made_by_input(task.stage) if task.phase == "input" and made_by_input is not None else 0
            while_each.append(now + made)
            if task in ended_by:
                now -= holds.pop(one, 0)
            elif task.phase == "input" and held_after_input is not None and one in holds:
                left = held_after_input(task.stage)
                now += left - holds[one]
                holds[one] = left
        found.append(tuple(while_each))
    return tuple(found)


def _last_parts(order: tuple[Task, ...]) -> set[Task]:
    """The tasks of a submesh whose end frees a microbatch's activations."""
    last: dict[tuple[int, int], Task] = {}
    for task in order:
        if task.phase != "update":
            last[task.stage, task.microbatch] = task
    return set(last.values())
