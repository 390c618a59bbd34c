"""When the tasks of a step really run: the measured twin of a simulated timeline.

In: a `Pipeline` that has run before, and the leaves of a step's arguments. Out: the results, and the `PipelineTimeline` of
all its tasks, those of other processes too; what runs once a step before the microbatches has no task and is not in it.

What the measurement disturbs: each submesh has a thread that waits for what a task takes, runs it, and waits for what it
gives. So no task is dispatched while the one before it runs, and every task bears its dispatch, some tens of microseconds
that a step otherwise hides; a transfer to a submesh counts as its waiting. Tasks of seconds to milliseconds are measured
well, shorter ones look longer than they are. Where there are several processes, all transfers must keep one order, so one
more thread makes them; each process times its own tasks by its host's clock, and the clocks are taken to agree.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.pipeline.run.arguments import Values
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.instructions import Call, Move, Spread
from autopar.pipeline.schedule.tasks import Task
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span
from autopar.runtime.distributed.exchange import Exchange, among_processes

#: The lane of transfers, where there are several processes.
_TRANSFERS = -1


def run_measured(
    pipeline: Pipeline, leaves: Sequence[Any], clock: Callable[[], float] = time.time
) -> tuple[list[Any], PipelineTimeline]:
    """Run a step and see when its tasks run. Of several processes every one calls this.

    Args:
        leaves: as for `Pipeline.run`, and as much used up.
        clock: seconds; the same for all processes.
    """
    watched, exchange = _Watched(pipeline, clock), among_processes()
    values = pipeline.begin(leaves)
    jax.block_until_ready([value for value in values if value is not None])
    if exchange is not None:
        exchange.judged("a measured step", None, lambda given: None)  # all begin together
    watched.run(values)
    spans = watched.spans if exchange is None else _of_all(exchange, watched.spans)
    title = f"{pipeline.schedule.name}, measured"
    return pipeline.end(values), PipelineTimeline(title, pipeline.schedule.num_submeshes, tuple(spans))


def _of_all(exchange: Exchange, mine: Sequence[Span]) -> list[Span]:
    """The spans of all processes. Where a submesh is several processes', a task is from the first start to the last end."""
    told = [[span.submesh, *span.task, span.start_s, span.end_s] for span in mine]
    given = exchange.judged("the tasks of a measured step", told, lambda each: [one.value for one in each])
    found: dict[tuple[Task, int], Span] = {}
    for rows in given:
        times: Counter[Task] = Counter()  # an update may be run in several pieces
        for submesh, stage, microbatch, phase, start_s, end_s in rows:
            task = Task(stage, microbatch, phase)
            times[task] += 1
            one = found.get((task, times[task]), Span(submesh, task, start_s, end_s))
            found[task, times[task]] = one._replace(start_s=min(start_s, one.start_s), end_s=max(end_s, one.end_s))
    return list(found.values())


class _Watched:
    """Runs the instructions of each submesh in a thread of its own."""

    def __init__(self, pipeline: Pipeline, clock: Callable[[], float]) -> None:
        self.clock = clock
        instructions = pipeline.instructions
        on = {task.stage: submesh for task, submesh in pipeline.schedule.submesh_of().items()}
        updates = {task.stage: task for task in pipeline.schedule.tasks if task.phase == "update"}
        self.lanes: dict[int, list[tuple[Call | Move | Spread, int, Task | None]]] = {}
        lane_of: list[int] = []
        for one in instructions.steps:
            submesh = on[one.stage if isinstance(one, Call) else instructions.stage_of[one.reads[0]]]
            lane = submesh if isinstance(one, Call) or jax.process_count() == 1 else _TRANSFERS
            task = one.task if isinstance(one, Call) else None
            if isinstance(one, Call) and task is None and isinstance(one.key, tuple) and one.key[0]:
                task = updates.get(one.stage, Task(one.stage, 0, "update"))
            self.lanes.setdefault(lane, []).append((one, submesh, task))
            lane_of.append(lane)
        #: Set when an instruction has run whose registers another lane waits for; what each instruction waits for.
        self.done: dict[int, threading.Event] = {}
        self.waits: dict[int, list[threading.Event]] = {}
        self._between(instructions.steps, lane_of)
        self.spans: list[Span] = []
        self.failed: list[BaseException] = []

    def _between(self, steps: Sequence[Call | Move | Spread], lane_of: Sequence[int]) -> None:
        """Of lanes that run beside each other: who fills a register goes before who reads it, and who reads it before who
        fills it anew, or writes over it."""
        filled: dict[int, int] = {}
        read: dict[int, list[int]] = {}
        for n, one in enumerate(steps):
            before = [filled[i] for i in one.reads if i in filled]
            before += [m for i in (*one.writes, *one.frees) for m in read.get(i, ())]
            waits = [m for m in dict.fromkeys(before) if lane_of[m] != lane_of[n]]
            self.waits[id(one)] = [self.done.setdefault(id(steps[m]), threading.Event()) for m in waits]
            for i in one.reads:
                read.setdefault(i, []).append(n)
            filled.update(dict.fromkeys(one.writes, n))

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
            for event in self.done.values():  # the others end, too
                event.set()

    def _one(self, one: Call | Move | Spread, submesh: int, task: Task | None, values: Values) -> None:
        if not isinstance(one, Call):
            self._wait(one)
            if not self.failed:
                one.run(values)
        elif one.is_mine:
            self._wait(one)
            if not self.failed:
                self._timed(one, submesh, task, values)
        if id(one) in self.done:
            self.done[id(one)].set()

    def _wait(self, one: Call | Move | Spread) -> None:
        for event in self.waits[id(one)]:
            event.wait()

    def _timed(self, one: Call, submesh: int, task: Task | None, values: Values) -> None:
        jax.block_until_ready([values[i] for i in one.reads])
        start_s = self.clock()
        one.run(values)
        jax.block_until_ready([values[i] for i in one.writes if i not in one.frees and values[i] is not None])
        if task is not None:
            self.spans.append(Span(submesh, task, start_s, self.clock()))
