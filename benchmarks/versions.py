"""Measure asynchronous pipelines: versions and idle time, the order with sleeps, convergence.

*rules*: for 2 to 8 equal stages without transfers, forward passes of 1 and backward passes of 2 units: the copies of the weights of
each stage and the delay of its gradients (least and largest, in updates), after filling, over 200 updates, and the idle time after filling in the simulator.
*sleeps*: makespan over the simulated one, with each piece of a real stream replaced by a sleep (100 ms forward, 200 ms backward) that returns prepared
arrays. Order, registers and moves are the stream's, with a thread per submesh; the least of three.
*convergence*: the decoder of two layers of `examples/async_pipeline.py` on this repository's documentation, two stages, four microbatches
per update, Adam with a warm-up of 100 updates; the mean loss of the last 50 of 600 updates, on the same batches under each rule.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
from autopar.pipeline.schedule.versions import delays_of, most_kept, versions_read

Row = dict[str, str | float]

UPDATES, MOST_IDLE = 200, 0.03
SLEEPS_S = {"forward": 0.1, "backward": 0.2}
STAGES, MOST_LONGER = 4, 1.05
TRAINED, AVERAGED, WARM_UP = 600, 50, 100


def measure(program: str) -> list[Row]:
    """Rows of one of the programs `rules`, `sleeps`, `convergence`."""
    return {"rules": _rules, "sleeps": _sleeps, "convergence": _convergence}[program]()


# -- rules -----------------------------------------------------------------------------------


def _rules() -> list[Row]:
    rows: list[Row] = []
    for name, kind in ASYNCHRONOUS.items():
        for p in range(2, 9):
            m = p if kind.reads.needs_filled else 1
            schedule = build(kind, p, m, num_updates=UPDATES)
            reads = versions_read(schedule, kind.reads, m)
            delays = [
                [n for t, n in delays_of(reads, m).items() if t.stage == s and t.microbatch >= m * p] for s in range(p)
            ]
            idle = _idle(kind, p, m)
            rows.append(
                {
                    "rule": name,
                    "stages": p,
                    "microbatches per update": m,
                    "copies": ", ".join(map(str, most_kept(schedule, reads))),
                    "delay": ", ".join(
                        f"{min(one)}" if min(one) == max(one) else f"{min(one)}-{max(one)}" for one in delays
                    ),
                    "idle after filling": idle,
                    "holds": idle <= MOST_IDLE,
                }
            )
    return rows


def _idle(kind: ScheduleKind, p: int, m: int) -> float:
    """The idle fraction of the time that one more batch takes."""
    durations = {"forward": 1, "backward": 2, "update": 0}
    ends = [simulate(build(kind, p, m, num_updates=n), lambda t: durations[t.phase]).makespan_s for n in (30, 31)]
    return 1 - 3 * m / (ends[1] - ends[0])


# -- sleeps ----------------------------------------------------------------------------------


def _step(weights: Sequence[Any], batch: Any) -> tuple[list[Any], Any]:
    def loss_of(weights: Sequence[Any]) -> Any:
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.square(x - batch).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def _sleeps() -> list[Row]:
    rows: list[Row] = []
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
        rows.append(
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
    return rows


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


# -- convergence -----------------------------------------------------------------------------


def _convergence() -> list[Row]:
    example: dict[str, Any] = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "async_pipeline.py"))
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, WARM_UP, TRAINED)
    example["train_step"].__globals__["optimizer"] = optax.chain(optax.clip_by_block_rms(1.0), optax.adam(rate))
    step, create, batches = example["train_step"], example["create_state"], example["batches"]
    losses: dict[str, list[float]] = {}
    options: dict[str, Any] = {"stages": 2, "num_microbatches": 4, "cache": False}
    synchronous = autopar.parallelize(step, schedule="1f1b", **options)
    state, own = create(jax.random.key(0)), []
    for batch in batches(TRAINED):
        state, loss = synchronous(state, batch)
        own.append(loss)
    losses["synchronous"] = [float(loss) for loss in own]
    for name in ASYNCHRONOUS:
        streamed = autopar.parallelize(step, consistency=name, **options)
        losses[name] = [float(loss) for loss in streamed.stream(create(jax.random.key(0)), batches(TRAINED))]
        streamed.drain()
    last = {name: float(np.mean(one[-AVERAGED:])) for name, one in losses.items()}
    return [
        {
            "rule": name,
            **{f"loss at {at}": float(np.mean(one[max(0, at - AVERAGED) : at])) for at in (100, 200, 400, TRAINED)},
            "over synchronous": last[name] / last["synchronous"],
        }
        for name, one in losses.items()
    ]
