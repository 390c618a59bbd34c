"""Schedule stages that form a DAG, or that share submeshes, by list scheduling.

In: the edges between stages, and the submesh of each stage.
Out: a `Schedule`, built by simulation. An idle submesh runs a ready backward pass first, else a ready forward pass, the
earliest microbatch first. With a split backward pass the priorities are: input part, forward pass, weight part. As in
1F1B, the in-flight microbatches of a stage are limited to the number of stages on the longest path from it to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from autopar.pipeline.schedule.tasks import Edges, Phase, Schedule, Task, synchronous_needs, with_updates
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
    apart = [(a, b) for b in range(num_stages) for a in range(b) if b not in after[a]]
    forks = (fork for fork in _connected(range(num_stages), apart) if len(fork) > 1)
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
    num_stages = len(submesh_of)
    to_end = [1] * num_stages
    for stage in reversed(range(num_stages)):
        to_end[stage] += max((to_end[target] for source, target in edges if source == stage), default=0)
    heads = [Task(stage, 0, phase) for stage in range(num_stages) for phase in _PHASES[backward]]
    every = [Task(head.stage, microbatch, head.phase) for head in heads for microbatch in range(num_microbatches)]
    needs = synchronous_needs((tuple(every),), edges)
    ended: dict[Task, float] = {}
    num_submeshes = max(submesh_of) + 1
    free_at, held = [0.0] * num_submeshes, [0] * num_stages
    orders: list[list[Task]] = [[] for _ in range(num_submeshes)]
    while heads:
        ready: list[tuple[float, int, int, int, int]] = []
        for n, task in enumerate(heads):
            is_forward = task.phase == "forward"
            full = backward != "none" and is_forward and held[task.stage] >= to_end[task.stage]
            if not full and all(one in ended for one in needs[task]):
                at = max([free_at[submesh_of[task.stage]], *(ended[one] for one in needs[task])])
                nearest = task.stage if is_forward else -task.stage
                ready.append((at, _RANKS[task.phase], task.microbatch, nearest, n))
        at, _, _, _, n = min(ready)
        task = heads.pop(n)
        submesh = submesh_of[task.stage]
        held[task.stage] += (task.phase == "forward") - (task.phase in ("backward", "weight"))
        ended[task] = free_at[submesh] = at + seconds(task)
        orders[submesh].append(task)
        if task.microbatch + 1 < num_microbatches:
            heads.append(task._replace(microbatch=task.microbatch + 1))
    laid = with_updates(tuple(map(tuple, orders)))
    built = Schedule(NAMES[backward], laid, synchronous_needs(laid, edges))
    check(built)
    return built
