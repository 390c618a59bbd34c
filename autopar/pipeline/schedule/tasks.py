"""What a pipeline runs, and in which order: pure data, without devices or durations.

In: for each submesh, its tasks in the order in which it runs them; which stage feeds which. Out: `Schedule`. Where a
stage stands is read off the orders alone, so that one stage may stand on several submeshes; what a task waits for is
data, so that a schedule may wait for more, less or other things than a synchronous step does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "input", "weight", "update"]
#: In the order in which a microbatch goes through them. "input" and "weight" are the two parts of a backward pass that
#: is split: the gradients of what the stage was given, and those of its parameters.
PHASES: tuple[Phase, ...] = ("forward", "backward", "input", "weight", "update")


class Task(NamedTuple):
    """One thing that a submesh runs. A tuple, for it is looked up often: a plan tries many schedules.

    Args:
        stage: the virtual stage, in the order of the program, from 0.
        microbatch: from 0. Of an update: the first microbatch that its submesh runs of the stage, mostly 0, or in an
            asynchronous schedule the one that it follows. A schedule that cuts a microbatch further, along the tokens
            say, counts its pieces here.
        phase: what of the stage.
    """

    stage: int
    microbatch: int
    phase: Phase

    def __str__(self) -> str:
        if self.phase == "update":
            return f"update of stage {self.stage}" + (f" (after {self.microbatch})" if self.microbatch else "")
        name = self.phase if self.phase in ("forward", "backward") else f"{self.phase} part of backward"
        return f"{name} of microbatch {self.microbatch} on stage {self.stage}"


Orders = tuple[tuple[Task, ...], ...]
Needs = Mapping[Task, tuple[Task, ...]]
#: (from, to): what stage `from` computes, stage `to` reads.
Edges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tasks in order, and what they wait for.

    Args:
        name: for people.
        orders: for each submesh, the tasks in the order in which it runs them, one at a time.
        needs: of each task, those that must have ended before it starts, besides the one before it on its submesh.
    """

    name: str
    orders: Orders
    needs: Needs = field(hash=False, repr=False)

    @property
    def num_submeshes(self) -> int:
        return len(self.orders)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All, submesh by submesh."""
        return tuple(task for order in self.orders for task in order)

    @property
    def num_stages(self) -> int:
        """Virtual stages: those of the program, however many submeshes run them."""
        return 1 + max((task.stage for task in self.tasks), default=-1)

    @property
    def num_microbatches(self) -> int:
        return 1 + max((task.microbatch for task in self.tasks), default=-1)

    def stages_on(self, submesh: int) -> tuple[int, ...]:
        """The stages that a submesh runs, in the order of the program."""
        return tuple(sorted({task.stage for task in self.orders[submesh]}))

    def submesh_of(self) -> dict[Task, int]:
        """Of each task, the submesh that runs it."""
        return {task: submesh for submesh, order in enumerate(self.orders) for task in order}


def chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    """Each stage feeds the next.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def with_updates(orders: Orders) -> Orders:
    """Each stage's update appended to the orders of the submeshes that run it, unless they hold updates already.

    A submesh that runs no backward pass updates nothing.
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
    """What each task of a synchronous step waits for.

    A forward pass waits for those of the stages before it, a backward pass (or its input part) for the same microbatch's
    forward pass and for the backward passes of the stages after it, a weight part for its input part, an update for all
    gradients of its stage, of every microbatch on every submesh.
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
        # One that is in no order is waited for nevertheless: `check` tells of it.
        places = [(stage, task.microbatch) for stage in after[task.stage]]
        return (own, *(back.get(place) or Task(*place, "backward") for place in places))

    return {task: needs(task) for task in tasks}
