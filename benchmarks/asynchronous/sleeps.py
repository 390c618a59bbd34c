"""Run the order of a real stream with sleeps in place of its pieces, and compare its makespan with the simulated one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.pipeline.run.calls_and_moves import Call
from autopar.pipeline.run.instances import Instances
from autopar.pipeline.run.measured import _MeasuredRun
from autopar.pipeline.run.stream import StreamedPipeline
from autopar.pipeline.run.stream_listing import StreamListing, dispatched
from autopar.pipeline.run.stream_program import Window
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.versions import versions_read

Row = dict[str, str | float]

SLEEPS_S = {"forward": 0.1, "backward": 0.2}
STAGES, MOST_LONGER = 4, 1.05


def _step(weights: Sequence[Any], batch: Any) -> tuple[list[Any], Any]:
    def loss_of(weights: Sequence[Any]) -> Any:
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.square(x - batch).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def rows() -> list[Row]:
    """A row for each rule."""
    found: list[Row] = []
    for name, kind in ASYNCHRONOUS.items():
        m = STAGES if kind.reads.needs_filled else 1
        count = 4 if m > 1 else 16
        weights, batch = [np.eye(16, dtype=np.float32)] * STAGES, np.ones((8, 16), np.float32)
        step = autopar.parallelize(_step, stages=STAGES, num_microbatches=m, consistency=name, cache=False)
        next(step.stream(weights, [batch]))
        flight = step._in_flight
        assert flight is not None, "it has just begun"
        schedule = build(kind, STAGES, m, num_updates=count)
        simulated = simulate(schedule, lambda t: SLEEPS_S.get(t.phase, 0.0)).makespan_s
        measured = min(_with_sleeps(flight.ready.pipeline, kind, count, flight.leaves) for _ in range(3))
        ratio = measured / simulated
        found.append(
            {
                "rule": name,
                "stages": STAGES,
                "microbatches": m * count,
                "simulated (s)": simulated,
                "with sleeps (s)": measured,
                "over simulated": ratio,
                "holds": ratio <= MOST_LONGER,
            }
        )
        step.drain()
    return found


def _with_sleeps(whole: StreamedPipeline, kind: ScheduleKind, count: int, leaves: Sequence[Any]) -> float:
    """Seconds from the first task to the last, with pieces replaced by sleeps."""
    streamed, m = whole.streamed, whole.streamed.num_microbatches
    schedule = build(kind, STAGES, m, num_updates=count)
    listing = StreamListing(streamed, versions_read(schedule, kind.reads, m))
    listed = listing.run(list(dispatched(STAGES, m, count)))
    store: dict[Any, Any] = {}
    window = Window(store, [whole.program.key(name) for name in listed.names], 0)

    def place() -> None:
        for n in range(count):
            first = Window(store, window.keys, n)
            streamed.arguments.place(leaves, first, None if n == 0 else whole.batch_leaves)
            store.update(whole.corrected.of_update(n))
        store.update(whole.corrected.at_start())

    place()
    bare: dict[int, Any] = {}
    made: dict[int, list[Any]] = {}
    for one in listed.steps:  # once for real; what is overwritten is not read again
        one.run(window)
        if isinstance(one, Call):
            made[id(one.program)] = [jnp.copy(window[i]) for i in one.writes]
            bare[id(one.program)] = one.program, one.program.jitted

    def sleeping(seconds: float, results: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(seconds)
            return results

        return run

    for one in listed.steps:
        if isinstance(one, Call):
            seconds = SLEEPS_S.get(one.task.phase, 0.0) if one.task is not None else 0.0
            one.program.jitted = sleeping(seconds, made[id(one.program)])
    place()
    shown = SimpleNamespace(
        instructions=SimpleNamespace(steps=tuple(listed.steps), stage_of=listing.stage_of),
        instances=Instances(schedule),
        pieces=streamed.stages,
        schedule=schedule,
    )
    measured: Any = _MeasuredRun(shown, time.perf_counter)  # type: ignore[arg-type]
    measured.run(window)
    for program, jitted in bare.values():
        program.jitted = jitted
    return max(span.end_s for span in measured.spans) - min(span.start_s for span in measured.spans)
