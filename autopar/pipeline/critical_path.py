"""Which tasks make a step as long as it is: the longest path through what waits for what.

In: what `simulate` takes. Out: its length, equal to the simulated makespan, and its tasks. It is found another way, from
the last tasks to the first through the whole graph, so that each holds the other to account.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter
from itertools import pairwise

from autopar.pipeline.simulate import Seconds, TransferSeconds, no_transfer
from autopar.pipeline.tasks import Schedule, Task


def longest_path(
    schedule: Schedule, seconds: Seconds, transfer_s: TransferSeconds = no_transfer
) -> tuple[float, tuple[Task, ...]]:
    """Seconds of the longest path, and its tasks from the first to the last.

    Raises:
        graphlib.CycleError: the schedule waits for itself; `simulate` says where.
    """
    submesh_of = schedule.submesh_of()
    followers = defaultdict[Task, dict[Task, float]](dict)  # with what passes between the two
    for order in schedule.orders:
        for task, following in pairwise(order):
            followers[task][following] = 0
    for task in schedule.tasks:
        for need in schedule.needs.get(task, ()):
            delay = transfer_s(need, task) if submesh_of[need] != submesh_of[task] else 0
            followers[need][task] = max(delay, followers[need].get(task, delay))
    from_here: dict[Task, float] = {}
    following_of: dict[Task, Task | None] = {}
    for task in TopologicalSorter({task: followers[task].keys() for task in schedule.tasks}).static_order():
        rest, best = 0, None
        for following, delay in followers[task].items():
            if best is None or delay + from_here[following] > rest:
                rest, best = delay + from_here[following], following
        from_here[task], following_of[task] = seconds(task) + rest, best
    if not from_here:
        return 0, ()
    task: Task | None = max(from_here, key=lambda task: from_here[task])
    length, path = from_here[task], []
    while task is not None:
        path.append(task)
        task = following_of[task]
    return length, tuple(path)
