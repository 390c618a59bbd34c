"""Say which version of a stage's weights each task reads, and which versions a stage keeps.

In: a schedule whose orders contain updates, and a `VersionRule`.
Out: the version that each task reads; the versions that are alive while it runs; the log of reads.

The version of a stage's weights is the number of updates that the stage has applied to them. A synchronous step reads one
version throughout. An asynchronous pipeline does not wait for the update of the microbatches in flight, so it reads older
versions. A version is alive until its last reader ends; the latest is always alive, because the next update reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.tasks import Schedule, Task


class Moment(NamedTuple):
    """What a rule sees when a task starts.

    Args:
        stage: the stage, of `num_stages`.
        microbatch: its running number, from 0.
        per_update: the number of microbatches per update.
        applied: the number of updates that the stage has applied: its latest version.
    """

    stage: int
    num_stages: int
    microbatch: int
    per_update: int
    applied: int

    @property
    def batch(self) -> int:
        """The number of the batch that the microbatch is part of, from 0: the version that its gradients are applied to."""
        return self.microbatch // self.per_update


@dataclass(frozen=True, slots=True)
class VersionRule:
    """Which version the passes of a microbatch read.

    Args:
        description: one clause, for reports.
        forward: a function that gives the version that a forward pass reads; below 0 stands for 0.
        backward: the same for a backward pass; None if it reads what its forward pass read.
        is_synchronous: whether all tasks of a step read the version with which it starts.
        needs_filled: whether it is defined only for at least as many microbatches per update as stages.
        corrects: whether a backward pass moves the weights that it reads back to the version of its forward pass, along their
            velocity: the moving average of their differences.
        least_further: a function from the number of microbatches per update to (a, b): a stage with n stages after it keeps at least
            a + b n versions beside the latest, by which stages are cut.
    """

    description: str
    forward: Callable[[Moment], int]
    backward: Callable[[Moment], int] | None = None
    is_synchronous: bool = False
    needs_filled: bool = False
    corrects: bool = False
    least_further: Callable[[int], tuple[float, float]] = lambda per_update: (0.0, 0.0)


#: GPipe, 1F1B and all others that empty the pipeline before they update.
SYNCHRONOUS = VersionRule("the version of the step", lambda at: at.batch, is_synchronous=True)
#: PipeDream's weight stashing (Harlap et al., 2018).
STASH = VersionRule(
    "the latest version, and the backward pass the same as its forward pass",
    lambda at: at.applied,
    least_further=lambda per_update: (0.0, 1 / per_update),
)
#: PipeDream's vertical sync: all stages read the version that the first one has when the microbatch enters.
VERTICAL = VersionRule(
    "on all stages the latest version of the first stage when the microbatch enters",
    lambda at: (at.microbatch - at.num_stages + 1) // at.per_update,
    least_further=lambda per_update: (0.0, 1 / per_update),
)
#: PipeDream-2BW (Narayanan et al., 2021).
DOUBLE_BUFFER = VersionRule(
    "the version before that of its batch, on all stages",
    lambda at: at.batch - 1,
    needs_filled=True,
    least_further=lambda per_update: (1.0, 0.0),
)
#: AMPNet (Gaunt et al., 2017): no stage keeps an old version.
LATEST = VersionRule("the latest version, forward and backward", lambda at: at.applied, lambda at: at.applied)
#: PipeMare's discrepancy correction (Yang et al., 2021).
LATEST_CORRECTED = VersionRule(
    "the latest version; the backward pass moves it back to that of its forward pass, along the velocity of the weights",
    lambda at: at.applied,
    lambda at: at.applied,
    corrects=True,
)


class Read(NamedTuple):
    """A line of the log: the versions that the passes of a microbatch read on a stage."""

    stage: int
    microbatch: int
    forward: int
    backward: int


def versions_read(schedule: Schedule, rule: VersionRule, per_update: int) -> dict[Task, int]:
    """The version that each task reads. An update reads the latest one, and writes the next.

    Args:
        per_update: the number of microbatches per update.

    Raises:
        ScheduleError: a task reads a version that its stage does not have yet.
    """
    found: dict[Task, int] = {}
    num_stages = schedule.num_stages
    for order in schedule.orders:
        applied: dict[int, int] = defaultdict(int)
        for task in order:
            at = Moment(task.stage, num_stages, task.microbatch, per_update, applied[task.stage])
            if task.phase == "update":
                found[task] = at.applied
                applied[task.stage] += 1
            elif task.phase == "forward":
                found[task] = max(0, rule.forward(at))
            elif rule.backward is not None:
                found[task] = max(0, rule.backward(at))
            else:
                found[task] = found[Task(task.stage, task.microbatch, "forward")]
            if found[task] > at.applied:
                raise ScheduleError(
                    f"schedule {schedule.name!r} cannot run: the {task} reads version {found[task]} of the weights, but its"
                    f" stage has applied {at.applied} updates by then. Let tasks read versions that exist"
                )
    return found


def distances_of(reads: Mapping[Task, int]) -> dict[Task, int]:
    """For each backward pass, the number of updates between the version that it reads and that of its forward pass."""
    return {
        task: version - reads[Task(task.stage, task.microbatch, "forward")]
        for task, version in reads.items()
        if task.phase == "backward"
    }


def mean_by_stage(numbers: Mapping[Task, int], num_stages: int, per_update: int) -> tuple[float, ...]:
    """The mean of delays or distances on each stage, over the microbatches of an update after filling.

    Args:
        numbers: of the passes of several batches more than the pipeline has in flight.
    """
    last = max(task.microbatch for task in numbers) // per_update
    of_one = [task for task in numbers if task.microbatch // per_update == last]
    return tuple(sum(numbers[task] for task in of_one if task.stage == s) / per_update for s in range(num_stages))


def log_of(reads: Mapping[Task, int]) -> Iterator[Read]:
    """The log of what forward and backward passes read, by stage and microbatch."""
    for task in sorted(task for task in reads if task.phase == "forward"):
        yield Read(task.stage, task.microbatch, reads[task], reads[Task(task.stage, task.microbatch, "backward")])


def alive_during(
    schedule: Schedule, reads: Mapping[Task, int], is_reader: Callable[[Task], bool] = lambda task: True
) -> dict[Task, tuple[int, ...]]:
    """The versions of its stage's weights that are alive while each task runs: those that it or a later task of the stage
    reads, and the latest. What an update writes counts from its end on.

    Args:
        is_reader: whether a forward or backward pass reads the weights in question; updates always do.
    """
    alive: dict[Task, tuple[int, ...]] = {}
    for order in schedule.orders:
        last: dict[tuple[int, int], int] = {}
        for n, task in enumerate(order):
            if task.phase == "update" or is_reader(task):
                last[task.stage, reads[task]] = n
        made: dict[int, list[int]] = defaultdict(lambda: [0])
        for n, task in enumerate(order):
            versions = made[task.stage]
            latest = versions[-1]
            versions[:] = [one for one in versions if one == latest or last.get((task.stage, one), -1) >= n]
            alive[task] = tuple(versions)
            if task.phase == "update":
                versions.append(latest + 1)
    return alive


def read_between(
    schedule: Schedule, reads: Mapping[Task, int], is_reader: Callable[[Task], bool]
) -> dict[Task, tuple[int, ...]]:
    """The versions that are between their first and their last reader while each task runs: of values that are computed from a
    version when a pass first reads them."""
    found: dict[Task, tuple[int, ...]] = {}
    for order in schedule.orders:
        spans: dict[tuple[int, int], list[int]] = {}
        for n, task in enumerate(order):
            if task.phase != "update" and is_reader(task):
                spans.setdefault((task.stage, reads[task]), [n]).append(n)
        for n, task in enumerate(order):
            found[task] = tuple(v for (s, v), at in spans.items() if s == task.stage and at[0] <= n <= at[-1])
    return found


def most_kept(schedule: Schedule, reads: Mapping[Task, int]) -> tuple[int, ...]:
    """For each stage, the largest number of versions of its weights that are alive at once."""
    most = [0] * schedule.num_stages
    for task, versions in alive_during(schedule, reads).items():
        most[task.stage] = max(most[task.stage], len(versions))
    return tuple(most)


def most_corrected(schedule: Schedule, reads: Mapping[Task, int]) -> tuple[int, ...]:
    """For each stage, the largest number of corrected versions that are alive at once, each from its first reader to its
    last."""
    distances, most = distances_of(reads), [0] * schedule.num_stages
    for order in schedule.orders:
        of = {task: (task.stage, reads[task], distances[task]) for task in order if distances.get(task)}
        last = {one: task for task, one in of.items()}
        alive: set[tuple[int, int, int]] = set()
        for task, one in of.items():
            alive.add(one)
            most[task.stage] = max(most[task.stage], sum(other[0] == task.stage for other in alive))
            alive -= {one} if last[one] == task else set()
    return tuple(most)


def delays_of(reads: Mapping[Task, int], per_update: int) -> dict[Task, int]:
    """For each forward pass, the number of updates between the version that it reads and the one that its gradients are
    applied to."""
    return {task: task.microbatch // per_update - version for task, version in reads.items() if task.phase == "forward"}
