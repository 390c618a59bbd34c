"""Order the tasks of a schedule by planned times, within the memory that stages leave.

In: the schedule as its authors print it, the cost of each stage, and transfers.
Out: schedules. Printed orders assume equal stages whose forward, input and weight parts take equally long. By list scheduling,
a submesh that is free runs the input part of a backward pass if one is ready, else a forward pass if there is room for its
activations, else a weight part, as the scheduler of Zero Bubble Pipeline Parallelism (Qi et al., 2023) does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.pipeline.partition.sends import Send
from autopar.pipeline.partition.step_time import task_seconds
from autopar.pipeline.schedule.dag import list_orders
from autopar.pipeline.schedule.in_flight import bytes_during_tasks
from autopar.pipeline.schedule.objective import StageCost
from autopar.pipeline.schedule.tasks import Edges, Schedule

#: A weight part waits if another task will be ready within this share of its time; neither is always the faster.
_PATIENCE = (0.0, 0.5)


def in_planned_order(
    printed: Schedule, edges: Edges, costs: Sequence[StageCost], sends: Iterable[Send], budget_bytes: Sequence[float]
) -> Iterator[Schedule]:
    """Schedules in as much memory as the printed one needs, and in all that there is.

    Args:
        printed: a schedule with a split backward pass that runs each stage on one submesh.
        budget_bytes: the memory budget of a device of each submesh.
    """
    submesh_of = [0] * printed.num_stages
    for task, submesh in printed.submesh_of().items():
        submesh_of[task.stage] = submesh
    of_submesh = [printed.stages_on(submesh) for submesh in range(printed.num_submeshes)]
    room = [
        budget - sum(costs[s].state_bytes for s in stages) - max(costs[s].working_bytes for s in stages)
        for budget, stages in zip(budget_bytes, of_submesh, strict=True)
    ]
    times = {(one.source, one.target): one.seconds for one in sends if one.when == "microbatch"}
    needed = [max(during_tasks) for during_tasks in bytes_during_tasks(printed, costs)]
    # A microbatch counts with the most that it ever holds.
    most = [max(one.flight_bytes + one.passed_bytes, one.kept_bytes + one.passed_bytes) for one in costs]
    limits_tried = dict.fromkeys((tuple(map(min, needed, room)), tuple(room)))
    for limits, patience in itertools.product(limits_tried, _PATIENCE):

        def may_start(stage: int, held: Sequence[int], limits: Sequence[float] = limits) -> bool:
            """Keep room for one microbatch of every later stage of the submesh, so that some microbatch can always end."""
            here = submesh_of[stage]
            flight = sum(held[s] * most[s] for s in of_submesh[here])
            kept = sum(most[s] for s in of_submesh[here] if s >= stage)
            return flight + kept <= limits[here] * (1 + 1e-9)

        orders = list_orders(
            edges,
            submesh_of,
            printed.num_microbatches,
            ("forward", "input", "weight"),
            task_seconds(costs),
            may_start,
            lambda source, target: times.get((source.stage, target.stage), 0.0),
            patience,
        )
        if sum(map(len, orders)) == len(printed.tasks):  # else some stage does not fit
            yield replace(printed, orders=orders)
