"""Schedule stages that form a DAG, or that share submeshes, by list scheduling.

In: the edges between stages, and the submesh of each stage.
Out: a `Schedule`, built by simulation. An idle submesh runs a ready backward pass first, else a ready forward pass, the
earliest microbatch first. With a split backward pass the priorities are: input part, forward pass, weight part. As in
1F1B, the in-flight microbatches of a stage are limited to the number of stages on the longest path from it to the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from autopar.pipeline.schedule.tasks import Edges, Orders, Phase, Schedule, Task, synchronous_needs, with_updates
from autopar.pipeline.schedule.verifier import check

Backward = Literal["whole", "split", "none"]
#: The schedule's name, by how its backward pass runs.
NAMES: Mapping[Backward, str] = MappingProxyType(
    {"whole": "as they come", "split": "parts as they come", "none": "forward, as they come"}
)
#: The description of each schedule, by name.
DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        NAMES["whole"]: "A submesh that is free runs a backward pass if one is ready, else the earliest forward pass.",
        NAMES[
            "split"
        ]: "A submesh that is free runs the input part of a backward pass if one is ready, else the earliest"
        " forward pass, else a weight part.",
        NAMES["none"]: "A submesh that is free runs the earliest forward pass that is ready.",
    }
)
_PHASES: Mapping[Backward, tuple[Phase, ...]] = MappingProxyType(
    {"whole": ("forward", "backward"), "split": ("forward", "input", "weight"), "none": ("forward",)}
)
#: The priority of phases that could start at the same time; the lowest number runs first.
_RANKS: Mapping[Phase, int] = MappingProxyType({"backward": 0, "input": 0, "forward": 1, "weight": 2})


def backward_in(name: str) -> Backward:
    """How the backward pass runs in the schedule of this name."""
    ways: tuple[Backward, ...] = ("whole", "split", "none")
    return next(way for way in ways if NAMES[way] == name)


def side_by_side(num_stages: int, edges: Edges) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Stages that do not depend on each other: for each fork of the program, the stages of each branch.

    >>> side_by_side(5, [(0, 1), (1, 2), (0, 3), (2, 4), (3, 4)])
    (((1, 2), (3,)),)
    """
    after: list[set[int]] = [set() for _ in range(num_stages)]
    for source, target in sorted(edges, reverse=True):
        after[source] |= {target} | after[target]
    independent = [(a, b) for b in range(num_stages) for a in range(b) if b not in after[a]]
    forks = (fork for fork in _connected(range(num_stages), independent) if len(fork) > 1)
    return tuple(_connected(fork, edges) for fork in forks)


def _connected(stages: Iterable[int], edges: Edges) -> tuple[tuple[int, ...], ...]:
    """The connected components of some stages."""
    groups = [{stage} for stage in stages]
    for source, target in edges:
        touched = [group for group in groups if source in group or target in group]
        if len(touched) == 2:
            touched[0] |= touched[1]
            groups.remove(touched[1])
    return tuple(tuple(sorted(group)) for group in groups)


def list_schedule(
    edges: Edges,
    submesh_of: Sequence[int],
    num_microbatches: int,
    *,
    seconds: Callable[[Task], float] = lambda task: 1.0,
    backward: Backward = "whole",
) -> Schedule:
    """Order the tasks by list scheduling.

    Args:
        edges: pairs of stages; the lower one feeds the higher one.
        submesh_of: the submesh of each stage.
        seconds: the duration of a task. Transfers take no time.
        backward: how the backward pass runs; "none" for a program without one.

    >>> schedule = list_schedule([(0, 1), (0, 2), (1, 3), (2, 3)], [0, 0, 1, 0], 1)
    >>> [str(task) for task in schedule.orders[1]][:1]
    ['forward of microbatch 0 on stage 2']
    """
    to_end = [1] * len(submesh_of)
    for stage in reversed(range(len(submesh_of))):
        to_end[stage] += max((to_end[target] for source, target in edges if source == stage), default=0)

    def may_start(stage: int, held: Sequence[int]) -> bool:
        return backward == "none" or held[stage] < to_end[stage]

    orders = list_orders(edges, submesh_of, num_microbatches, _PHASES[backward], seconds, may_start)
    built = Schedule(NAMES[backward], orders, synchronous_needs(orders, edges))
    check(built)
    return built


def list_orders(
    edges: Edges,
    submesh_of: Sequence[int],
    num_microbatches: int,
    phases: Sequence[Phase],
    seconds: Callable[[Task], float],
    may_start: Callable[[int, Sequence[int]], bool],
    transfer_s: Callable[[Task, Task], float] = lambda source, target: 0.0,
    patience: float = 0.0,
) -> Orders:
    """The tasks of each submesh by list scheduling, updates last.

    Args:
        phases: those of a microbatch on a stage.
        may_start: whether a stage may start another forward pass, by its number and the in-flight microbatches of every
            stage. It must leave room for some microbatch to end.
        transfer_s: seconds from the end of a task until the second one has what it needs of it.
        patience: a weight part waits if another task will be ready within this share of its time.
    """
    every = [
        Task(stage, microbatch, phase)
        for stage in range(len(submesh_of))
        for phase in phases
        for microbatch in range(num_microbatches)
    ]
    needs = synchronous_needs((tuple(every),), edges)
    users: dict[Task, list[Task]] = {task: [] for task in every}
    waits_for = {task: len(needs[task]) for task in every}
    for task in every:
        for need in needs[task]:
            users[need].append(task)
    num_submeshes = max(submesh_of) + 1
    heads: list[list[Task]] = [[] for _ in range(num_submeshes)]
    for stage, submesh in enumerate(submesh_of):
        heads[submesh] += [Task(stage, 0, phase) for phase in phases]
    ready_at = dict.fromkeys(every, 0.0)
    free_at, held = [0.0] * num_submeshes, [0] * len(submesh_of)
    orders: list[list[Task]] = [[] for _ in range(num_submeshes)]
    events = [(0.0, submesh) for submesh in range(num_submeshes)]
    last_phase = phases[-1]
    while events:
        now, submesh = heapq.heappop(events)
        if now < free_at[submesh]:
            continue
        startable = [
            task
            for task in heads[submesh]
            if not waits_for[task]
            and ready_at[task] <= now
            and (task.phase != "forward" or may_start(task.stage, held))
        ]
        if not startable:
            continue
        task = min(startable, key=_urgency)
        soon = now + patience * seconds(task)
        if task.phase == "weight" and any(
            now < ready_at[one] < soon and not waits_for[one] and one.phase != "weight" for one in heads[submesh]
        ):
            continue  # an event is due then
        end = now + seconds(task)
        held[task.stage] += (task.phase == phases[0]) - (task.phase == last_phase)
        orders[submesh].append(task)
        at = heads[submesh].index(task)
        heads[submesh][at : at + 1] = (
            [task._replace(microbatch=task.microbatch + 1)] if task.microbatch + 1 < num_microbatches else []
        )
        free_at[submesh] = end
        heapq.heappush(events, (end, submesh))
        for user in users[task]:
            waits_for[user] -= 1
            ready_at[user] = max(ready_at[user], end + transfer_s(task, user))
            if not waits_for[user]:
                heapq.heappush(events, (ready_at[user], submesh_of[user.stage]))
    return with_updates(tuple(map(tuple, orders)))


def _urgency(task: Task) -> tuple[int, int, int]:
    """The order of tasks that could start now: by phase and microbatch, then the stage that is nearest to the microbatch's
    end or, in a forward pass, to its start."""
    return _RANKS[task.phase], task.microbatch, task.stage if task.phase == "forward" else -task.stage
