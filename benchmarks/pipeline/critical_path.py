"""Find the critical path of a step: the longest path through its dependences.

In: the arguments of `simulate`, with links that no transfers share. Out: the path's tasks, and its length, which equals the simulated makespan. The path is
found independently of the simulator, backward from the last tasks, so that each checks the other.
"""

from __future__ import annotations

from itertools import pairwise

from autopar.pipeline.schedule.simulate import Seconds, TransferSeconds, no_transfer
from autopar.pipeline.schedule.tasks import Schedule, Task


def longest_path(
    schedule: Schedule, seconds: Seconds, transfer_s: TransferSeconds = no_transfer
) -> tuple[float, tuple[Task, ...]]:
    """Seconds of the longest path, and its tasks in order.

    The schedule must have no cyclic dependence (`check`).
    """
    tasks = schedule.tasks
    number = {task: i for i, task in enumerate(tasks)}
    submesh = [on for on, order in enumerate(schedule.orders) for _ in order]
    # For each task, its predecessors with the transfer time from each, and its number of successors.
    before: list[list[tuple[int, float]]] = [[] for _ in tasks]
    num_after = [0] * len(tasks)
    for i, following in pairwise(range(len(tasks))):
        if submesh[i] == submesh[following]:
            before[following].append((i, 0))
    for i, task in enumerate(tasks):
        for need in schedule.needs.get(task, ()):
            n = number[need]
            before[i].append((n, transfer_s(need, task) if submesh[n] != submesh[i] else 0))
        for n, _ in before[i]:
            num_after[n] += 1
    rest: list[float] = [0] * len(tasks)  # from the end of a task to the end of the step
    then: list[int | None] = [None] * len(tasks)
    first, length = None, -1
    ready = [i for i, count in enumerate(num_after) if not count]
    for i in ready:  # grows in the loop
        from_here = seconds(tasks[i]) + rest[i]
        if from_here > length:
            first, length = i, from_here
        for n, delay in before[i]:
            if then[n] is None or delay + from_here > rest[n]:
                rest[n], then[n] = delay + from_here, i
            num_after[n] -= 1
            if not num_after[n]:
                ready.append(n)
    assert len(ready) == len(tasks), f"{schedule.name} waits for itself"
    path = []
    while first is not None:
        path.append(tasks[first])
        first = then[first]
    return max(length, 0), tuple(path)
