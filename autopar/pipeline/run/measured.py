"""Measure when each task of a step runs.

In: a `Pipeline` that has run before, and the leaves of a step's arguments.
Out: the results, and the measured `PipelineTimeline` of all tasks of all processes. Pieces that run once per step
before the microbatches belong to no task and are left out.

The measurement disturbs the step. Each submesh has a thread that waits for a task's inputs, runs the task, and waits
for its outputs. No task is dispatched while the previous one runs, so each task includes its dispatch, some tens of
microseconds that a normal step hides. Transfers to a submesh count as waiting. Tasks of milliseconds or more are
measured well; shorter ones look longer than they are. With several processes, one more thread makes all transfers,
because their order must be the same everywhere. Each process uses its host's clock; the clocks are assumed to agree.
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
from autopar.pipeline.run.instructions import Call, Instruction
from autopar.pipeline.schedule.tasks import Task
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span
from autopar.runtime.distributed.exchange import Exchange, among_processes

#: The key of the thread that makes transfers between processes.
_TRANSFERS = -1


def run_measured(
    pipeline: Pipeline, leaves: Sequence[Any], clock: Callable[[], float] = time.time
) -> tuple[list[Any], PipelineTimeline]:
    """Run a step and time its tasks. Every process must call this.

    Args:
        leaves: the arguments of `Pipeline.run`; donated ones are consumed.
        clock: a function that returns seconds, the same clock for all processes.
    """
    measured, exchange = _MeasuredRun(pipeline, clock), among_processes()
    values = pipeline.begin(leaves)
    jax.block_until_ready([value for value in values if value is not None])
    if exchange is not None:
        exchange.judged("a measured step", None, lambda given: None)  # a barrier: all start together
    measured.run(values)
    spans = measured.spans if exchange is None else _of_all(exchange, measured.spans)
    title = f"{pipeline.schedule.name}, measured"
    return pipeline.end(values), PipelineTimeline(title, pipeline.schedule.num_submeshes, tuple(spans))


def _of_all(exchange: Exchange, mine: Sequence[Span]) -> list[Span]:
    """The spans of all processes. A task on several processes lasts from the first start to the last end."""
    rows = [[span.submesh, *span.task, span.start_s, span.end_s] for span in mine]
    given = exchange.judged("the tasks of a measured step", rows, lambda each: [one.value for one in each])
    found: dict[tuple[Task, int], Span] = {}
    for rows in given:
        times: Counter[Task] = Counter()  # an update may consist of several pieces
        for submesh, stage, microbatch, phase, start_s, end_s in rows:
            task = Task(stage, microbatch, phase)
            times[task] += 1
            one = found.get((task, times[task]), Span(submesh, task, start_s, end_s))
            found[task, times[task]] = one._replace(start_s=min(start_s, one.start_s), end_s=max(end_s, one.end_s))
    return list(found.values())


class _MeasuredRun:
    """Runs the instructions of each submesh in its own thread."""

    def __init__(self, pipeline: Pipeline, clock: Callable[[], float]) -> None:
        self.clock = clock
        instructions = pipeline.instructions
        instances = pipeline.instances
        on = [instances.submesh(instance) for instance in range(len(pipeline.pieces))]
        updates = {instances.of_task(task): task for task in pipeline.schedule.tasks if task.phase == "update"}
        self.queues: dict[int, list[tuple[Instruction, int, Task | None]]] = {}
        thread_of: list[int] = []
        for one in instructions.steps:
            if isinstance(one, Call):
                queue = on[one.stage]
            else:
                queue = _TRANSFERS if jax.process_count() > 1 else on[instructions.stage_of[one.reads[0]]]
            task = one.task if isinstance(one, Call) else None
            if isinstance(one, Call) and task is None and isinstance(one.key, tuple) and one.key[0]:
                task = updates.get(one.stage, Task(instances.stage(one.stage), 0, "update"))
            self.queues.setdefault(queue, []).append((one, queue, task))
            thread_of.append(queue)
        #: The event set after each instruction that another thread waits for, and the events each instruction waits
        #: for.
        self.done: dict[int, threading.Event] = {}
        self.waits: dict[int, list[threading.Event]] = {}
        self._order(instructions.steps, thread_of)
        self.spans: list[Span] = []
        self.failed: list[BaseException] = []

    def _order(self, steps: Sequence[Instruction], thread_of: Sequence[int]) -> None:
        """Order instructions of different threads: a register is written before it is read, and read before it is
        overwritten or freed."""
        filled: dict[int, int] = {}
        read: dict[int, list[int]] = {}
        for n, one in enumerate(steps):
            before = [filled[i] for i in one.reads if i in filled]
            before += [m for i in (*one.writes, *one.frees) for m in read.get(i, ())]
            waits = [m for m in dict.fromkeys(before) if thread_of[m] != thread_of[n]]
            self.waits[id(one)] = [self.done.setdefault(id(steps[m]), threading.Event()) for m in waits]
            for i in one.reads:
                read.setdefault(i, []).append(n)
            filled.update(dict.fromkeys(one.writes, n))

    def run(self, values: Values) -> None:
        """Run all instructions. An error in one thread ends all threads."""
        threads = [
            threading.Thread(target=self._run_queue, args=(queue, values), daemon=True)
            for queue in self.queues.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def _run_queue(self, queue: Sequence[tuple[Instruction, int, Task | None]], values: Values) -> None:
        try:
            for one, submesh, task in queue:
                self._run_instruction(one, submesh, task, values)
        except BaseException as error:
            self.failed.append(error)
            for event in self.done.values():  # release the other threads
                event.set()

    def _run_instruction(self, one: Instruction, submesh: int, task: Task | None, values: Values) -> None:
        if not isinstance(one, Call):
            self._wait(one)
            if not self.failed:
                one.run(values)
        else:
            self._wait(one)
            if not self.failed:
                self._timed(one, submesh, task, values)
        if id(one) in self.done:
            self.done[id(one)].set()

    def _wait(self, one: Instruction) -> None:
        for event in self.waits[id(one)]:
            event.wait()

    def _timed(self, one: Call, submesh: int, task: Task | None, values: Values) -> None:
        jax.block_until_ready([values[i] for i in one.reads])
        start_s = self.clock()
        one.run(values)
        jax.block_until_ready([values[i] for i in one.writes if i not in one.frees and values[i] is not None])
        if task is not None:
            self.spans.append(Span(submesh, task, start_s, self.clock()))
