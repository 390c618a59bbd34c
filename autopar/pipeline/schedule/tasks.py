"""Define tasks and schedules: pure data, without devices or durations.

In: the ordered tasks of each submesh, and the edges between stages.
Out: `Schedule`. The orders alone say which submesh runs a stage, so a stage may run on several submeshes. Dependencies
are data, so a schedule may have more, fewer or other dependencies than a synchronous step.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "input", "weight", "update"]
#: In the order of a microbatch. "input" and "weight" are the two parts of a split backward pass: the gradients of the
#: stage's inputs and those of its parameters.
PHASES: tuple[Phase, ...] = ("forward", "backward", "input", "weight", "update")


class Task(NamedTuple):
    """One unit of work of a submesh. A tuple, because the search looks tasks up very often.

    Args:
        stage: the virtual stage, in program order, from 0.
        microbatch: the microbatch, from 0. For an update: the first microbatch of the stage on its submesh, usually 0;
            in an asynchronous schedule, the first microbatch of the batch that it applies. A schedule that splits
            microbatches further, for example along tokens, counts the parts.
        phase: the phase of the stage.
    """

    stage: int
    microbatch: int
    phase: Phase

    def __str__(self) -> str:
        if self.phase == "update":
            return f"update of stage {self.stage}" + (
                f" from microbatch {self.microbatch} on" if self.microbatch else ""
            )
        name = self.phase if self.phase in ("forward", "backward") else f"{self.phase} part of backward"
        return f"{name} of microbatch {self.microbatch} on stage {self.stage}"


Orders = tuple[tuple[Task, ...], ...]
Needs = Mapping[Task, tuple[Task, ...]]
#: For each part of a microbatch, its share in the seconds of the forward pass, and of the backward pass.
Shares = tuple[tuple[float, float], ...]
#: (producer, user): the second stage reads what the first one computes.
Edges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Wiring:
    """A schedule by numbers of tasks, for the simulator.

    Args:
        submesh: the submesh of each task.
        orders: the tasks of each submesh.
        users: for each task, the tasks that depend on it, those of the nearest stages first.
        num_needs: for each task, the number of tasks that it depends on, including those that no submesh runs.
    """

    tasks: tuple[Task, ...]
    submesh: list[int]
    orders: list[range]
    users: list[list[int]]
    num_needs: list[int]


@dataclass(frozen=True)
class Schedule:
    """Ordered tasks and their dependencies.

    Args:
        name: the schedule's name.
        orders: for each submesh, its tasks in the order in which it runs them, one at a time.
        needs: for each task, the tasks that must end before it starts, in addition to the previous one on its submesh.
        shares: the shares of the parts of each microbatch.
    """

    name: str
    orders: Orders
    needs: Needs = field(hash=False, repr=False)
    shares: Shares = ((1.0, 1.0),)

    @property
    def num_submeshes(self) -> int:
        return len(self.orders)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, submesh by submesh."""
        return tuple(task for order in self.orders for task in order)

    @property
    def num_stages(self) -> int:
        """The number of virtual stages; a stage on several submeshes counts once."""
        return 1 + max((task.stage for task in self.tasks), default=-1)

    @property
    def num_microbatches(self) -> int:
        return 1 + max((task.microbatch for task in self.tasks), default=-1)

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass has an input part and a weight part."""
        return any(task.phase == "input" for task in self.tasks)

    def share(self, task: Task) -> float:
        """The share of a task in the seconds of its phase for a whole microbatch."""
        return self.shares[task.microbatch % len(self.shares)][task.phase != "forward"]

    @functools.cached_property
    def wiring(self) -> Wiring:
        """The schedule by numbers; a search simulates it many times."""
        tasks = self.tasks
        number = {task: n for n, task in enumerate(tasks)}
        submesh = [on for on, order in enumerate(self.orders) for _ in order]
        users: list[list[int]] = [[] for _ in tasks]
        num_needs = [0] * len(tasks)
        for n, task in enumerate(tasks):
            for need in dict.fromkeys(self.needs.get(task, ())):
                num_needs[n] += 1
                if need in number:
                    users[number[need]].append(n)
        for task, own in zip(tasks, users, strict=True):
            own.sort(key=lambda n: (abs(tasks[n].stage - task.stage), tasks[n].stage))
        starts = [0, *itertools.accumulate(map(len, self.orders))]
        orders = [range(start, stop) for start, stop in itertools.pairwise(starts)]
        return Wiring(tasks, submesh, orders, users, num_needs)

    def stages_on(self, submesh: int) -> tuple[int, ...]:
        """The stages that a submesh runs, in program order."""
        return tuple(sorted({task.stage for task in self.orders[submesh]}))

    def submesh_of(self) -> dict[Task, int]:
        """The submesh of each task."""
        return {task: submesh for submesh, order in enumerate(self.orders) for task in order}

    @functools.cached_property
    def place_of(self) -> dict[tuple[int, int], int]:
        """The submesh that runs each stage and microbatch."""
        orders = enumerate(self.orders)
        return {(t.stage, t.microbatch): submesh for submesh, order in orders for t in order if t.phase != "update"}

    @functools.cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the submeshes that run it; the one with its first microbatch comes first.

        >>> forward = [Task(0, 1, "forward")], [Task(0, 0, "forward")]
        >>> Schedule("both", tuple(map(tuple, forward)), {}).replicas
        ((1, 0),)
        """
        found: dict[int, dict[int, None]] = {stage: {} for stage in range(self.num_stages)}
        for (stage, _), submesh in sorted(self.place_of.items()):
            found[stage][submesh] = None
        return tuple(tuple(submeshes) for submeshes in found.values())

    @property
    def num_replicas(self) -> int:
        """The largest number of submeshes that run one stage."""
        return max(map(len, self.replicas), default=1)


def chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    """The edges of a chain, in which each stage feeds the next.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def chain_with(num_stages: int, edges: Edges) -> tuple[tuple[int, int], ...]:
    """The edges of a chain in which stages also feed later ones directly.

    >>> chain_with(3, [(0, 2)])
    ((0, 1), (0, 2), (1, 2))
    """
    return tuple(sorted({*chain(num_stages), *edges}))


def with_updates(orders: Orders) -> Orders:
    """Append each stage's update to the orders of the submeshes that run it, unless the orders contain updates.

    A submesh that runs no backward pass has no update.
    """
    if any(task.phase == "update" for order in orders for task in order):
        return orders
    whole = []
    for order in orders:
        first: dict[int, int] = {}
        for task in order:
            if task.phase in ("backward", "weight"):
                first[task.stage] = min(task.microbatch, first.get(task.stage, task.microbatch))
        whole.append((*order, *(Task(stage, first[stage], "update") for stage in sorted(first))))
    return tuple(whole)


def synchronous_needs(orders: Orders, edges: Edges) -> dict[Task, tuple[Task, ...]]:
    """The dependencies of each task in a synchronous step.

    - A forward pass depends on the forward passes of the preceding stages.
    - A backward pass, or its input part, depends on its own forward pass and on the backward passes of the following
      stages.
    - A weight part depends on its input part.
    - An update depends on all gradients of its stage, of every microbatch on every submesh.
    """
    before, after = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    tasks = [task for order in orders for task in order]
    back = {(task.stage, task.microbatch): task for task in tasks if task.phase in ("backward", "input")}
    gradients = defaultdict[int, list[Task]](list)
    for task in tasks:
        if task.phase in ("backward", "weight"):
            gradients[task.stage].append(task)

    def needs(task: Task) -> tuple[Task, ...]:
        if task.phase == "forward":
            return tuple(Task(stage, task.microbatch, "forward") for stage in before[task.stage])
        if task.phase == "weight":
            return (Task(task.stage, task.microbatch, "input"),)
        if task.phase == "update":
            return tuple(gradients[task.stage])
        own = Task(task.stage, task.microbatch, "forward")
        # A task that is in no order stays a dependency, so that `check` reports it.
        places = [(stage, task.microbatch) for stage in after[task.stage]]
        return (own, *(back.get(place) or Task(*place, "backward") for place in places))

    return {task: needs(task) for task in tasks}
