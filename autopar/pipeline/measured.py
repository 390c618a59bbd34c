"""When the tasks of a step really run: the measured twin of a simulated timeline.

In: a `Pipeline` that has run before, and the leaves of a step's arguments. Out: the results, and the `PipelineTimeline` of
the tasks of this process's submeshes; what runs once a step before the microbatches has no task and is not in it.

What the measurement disturbs: each submesh has a thread that waits for what a task takes, runs it, and waits for what it
gives. So no task is dispatched while the one before it runs, and every task bears its dispatch, some tens of microseconds
that a step otherwise hides; a transfer to a submesh counts as its waiting. Tasks of seconds to milliseconds are measured
well, shorter ones look longer than they are. Where there are several processes, all transfers must keep one order: there
one thread goes through all, and of several submeshes of one process only one runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.pipeline.arguments import Values
from autopar.pipeline.instructions import Call, Move, Spread
from autopar.pipeline.run import Pipeline
from autopar.pipeline.spans import PipelineTimeline, Span
from autopar.pipeline.tasks import Task


def run_measured(
    pipeline: Pipeline, leaves: Sequence[Any], clock: Callable[[], float] = time.time
) -> tuple[list[Any], PipelineTimeline]:
    """Run a step and see when its tasks run.

    Args:
        leaves: as for `Pipeline.run`, and as much used up.
        clock: seconds; that of all processes whose timelines are to be put together.
    """
    watched = _Watched(pipeline, clock)
    values = pipeline.begin(leaves)
    jax.block_until_ready([value for value in values if value is not None])
    watched.run(values)
    title = f"{pipeline.schedule.name}, measured"
    return pipeline.end(values), PipelineTimeline(title, pipeline.schedule.num_submeshes, tuple(watched.spans))


class _Watched:
    """Runs the instructions of each submesh in a thread of its own."""

    def __init__(self, pipeline: Pipeline, clock: Callable[[], float]) -> None:
        self.clock = clock
        instructions = pipeline.instructions
        on = {task.stage: submesh for task, submesh in pipeline.schedule.submesh_of().items()}
        updates = {task.stage: task for task in pipeline.schedule.tasks if task.phase == "update"}
        lanes: dict[int, list[tuple[Call | Move | Spread, int, Task | None]]] = {}
        self.writes: dict[int, int] = {}  # how often a register is filled by another lane
        for one in instructions.steps:
            submesh = on[one.stage if isinstance(one, Call) else instructions.stage_of[one.reads[0]]]
            lane = submesh if jax.process_count() == 1 else 0
            task = one.task if isinstance(one, Call) else None
            if isinstance(one, Call) and task is None and isinstance(one.key, tuple) and one.key[0]:
                task = updates.get(one.stage, Task(one.stage, 0, "update"))
            lanes.setdefault(lane, []).append((one, submesh, task))
        self.lanes = lanes
        self.arrived = {i: threading.Event() for one in instructions.steps if isinstance(one, Move) for i in one.writes}
        self.spans: list[Span] = []
        self.failed: list[BaseException] = []

    def run(self, values: Values) -> None:
        """All instructions; an error of one thread ends all."""
        threads = [
            threading.Thread(target=self._lane, args=(lane, values), daemon=True) for lane in self.lanes.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def _lane(self, lane: Sequence[tuple[Call | Move | Spread, int, Task | None]], values: Values) -> None:
        try:
            for one, submesh, task in lane:
                self._one(one, submesh, task, values)
        except BaseException as error:
            self.failed.append(error)
            for event in self.arrived.values():  # the others meet it in what they wait for
                event.set()

    def _one(self, one: Call | Move | Spread, submesh: int, task: Task | None, values: Values) -> None:
        if not isinstance(one, Call):
            one.run(values)
            for i in one.writes:
                if i in self.arrived:
                    self.arrived[i].set()
            return
        for i in one.reads:
            if i in self.arrived:
                self.arrived[i].wait()
        if not one.is_mine or self.failed:
            return
        jax.block_until_ready([values[i] for i in one.reads])
        start_s = self.clock()
        one.run(values)
        jax.block_until_ready([values[i] for i in one.writes if i not in one.frees and values[i] is not None])
        if task is not None:
            self.spans.append(Span(submesh, task, start_s, self.clock()))
