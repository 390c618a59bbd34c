"""Processes of a training job under `autopar keep` are killed, frozen or cut off at random moments. FSDP on four members with one CPU
device each, Gloo; copies of the state every 10 steps; heartbeat timeout 5 s; killed members return after a second.

*kills*: kill -9 of a random worker, or of a random member with its worker. *frozen*: SIGSTOP of one of these. *keeper*: kill -9 of the
keeper, which is started again up to 3 s later; at every second moment a worker is killed meanwhile. *connections*: a proxy drops all
connections between members and keeper.

*recovery*: seconds from the fault until the next generation begins its first step, which may still compile; *without start-up*: the
same without the time that new processes need to import, where a fault comes before the last one's have. *first step done*: until it
is done, compilation included. *pause*: the longest time between two steps where no generation ended. *bound*: timeout + 5 s. Every
step must be done: the loss of each step, as it was done last, is compared with that of one device without faults.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults import fsdp
from benchmarks.faults.kept_job import KeptJob, losses
from benchmarks.faults.proxy import Proxy

Row = dict[str, Any]

TIMEOUT_S, BOUND_S, MEMBERS, MOMENTS = 5.0, 10.0, 4, 10
_OPTIONS = ("--timeout", f"{TIMEOUT_S:g}", "--every", "10", "--ahead", "2", "--return-after", "1")
PROGRAM = Path(__file__).parent / "fsdp.py"


def measure(program: str) -> list[Row]:
    kind, _, number = program.partition(" ")
    return [_PROGRAMS[kind](random.Random(f"{kind} {number}"))]


@contextmanager
def _job(apart: bool = False) -> Iterator[KeptJob]:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(PROGRAM), "kept", str(Path(folder) / "log"), "1000000", "0.03"]
        with KeptJob(Path(folder), command, *_OPTIONS, members=MEMBERS, apart=apart) as job:
            yield job


def _first_step_since(job: KeptJob, since_s: float) -> Row | None:
    """The first step of a generation that started after a moment."""
    starts = [one["at_s"] for one in job.events("start") if one["at_s"] > since_s and one["rank"] == 0]
    later = [one for one in job.events("step") if starts and one["began_s"] > starts[0]]
    return later[0] if later else None


def _recovered(job: KeptJob, since_s: float) -> tuple[float, float, float]:
    """Seconds until the first step begins, the same without start-up of processes, and until it is done."""
    job.wait(lambda: _first_step_since(job, since_s) is not None)
    step = _first_step_since(job, since_s)
    assert step is not None
    used = {one["pid"] for one in job.events("start") if since_s < one["at_s"] < step["at_s"]}
    imported = [one["at_s"] for one in job.events("imported") if one["pid"] in used]
    start_up_s = max(0.0, *(at_s - since_s for at_s in imported))
    return step["began_s"] - since_s, step["began_s"] - since_s - start_up_s, step["at_s"] - since_s


def _at_random_moments(
    job: KeptJob, rng: random.Random, fault: Callable[[int], None]
) -> list[tuple[float, float, float]]:
    job.at(30)
    found = []
    for number in range(MOMENTS):
        time.sleep(rng.uniform(2.0, 10.0))
        since_s = time.time()
        fault(number)
        found.append(_recovered(job, since_s))
    return found


def _row(job: KeptJob, times: list[tuple[float, float, float]], **more: Any) -> Row:
    steps = job.events("step")
    worst = worst_difference(losses(steps))
    counts = sorted({one["count"] for one in steps})
    row: Row = {"moments": MOMENTS, "steps": max(one["step"] for one in steps), "workers": counts, **more}
    if times:
        for name, values in zip(
            ("recovery", "without start-up", "first step done"), zip(*times, strict=True), strict=True
        ):
            row |= {f"{name}, {which} s": round(of(values), 2) for which, of in _FIGURES.items()}
        row["within the bound"] = f"{sum(without <= BOUND_S for _, without, _ in times)} of {len(times)}"
    return {**row, "largest difference of a loss": f"{worst:.1g}"}


_FIGURES: dict[str, Any] = {"least": min, "median": statistics.median, "greatest": max}


def worst_difference(history: dict[int, tuple[int, float]], written: tuple[Any, Any] | None = None) -> float:
    """The largest relative difference of a loss to that of one device without faults.

    Args:
        written: the step, and the function that makes the state; by default those of FSDP.

    Raises:
        AssertionError: a step is missing.
    """
    import jax

    last = max(history)
    assert sorted(history) == list(range(1, last + 1)), "every step was done"
    step, create_state = written or fsdp.as_written()
    compiled, state, worst = jax.jit(step), create_state(jax.random.key(0)), 0.0
    for number, batch in enumerate(fsdp.batches(0, last, slice(0, fsdp.BATCH)), 1):
        state, loss = compiled(state, batch)
        worst = max(worst, abs(history[number][1] / float(loss) - 1))
    return worst


def _target(job: KeptJob, rng: random.Random) -> int:
    """A worker of the newest generation, or the member that started it."""
    while True:
        count = job.events("step")[-1]["count"]
        target = job.worker(rng.randrange(count))[rng.choice(["pid", "agent"])]
        if job.exists(target):
            return target
        time.sleep(0.05)  # it has just ended by the last fault


def _kills(rng: random.Random) -> Row:
    with _job() as job:
        times = _at_random_moments(job, rng, lambda _: os.kill(_target(job, rng), signal.SIGKILL))
        return _row(job, times)


def _frozen(rng: random.Random) -> Row:
    with _job() as job:
        times = _at_random_moments(job, rng, lambda _: os.kill(_target(job, rng), signal.SIGSTOP))
        return _row(job, times)


def _pause(job: KeptJob, since_s: float) -> float:
    """The longest time between two steps from a moment on."""
    ends = [since_s, *(one["at_s"] for one in job.events("step") if one["at_s"] > since_s)]
    return max(after - before for before, after in itertools.pairwise(ends))


def _keeper(rng: random.Random) -> Row:
    pauses, times = [], []
    with _job() as job:
        job.at(30)
        for number in range(MOMENTS):
            time.sleep(rng.uniform(2.0, 8.0))
            generations, since_s = len(job.events("start")), time.time()
            job.keeper.kill()
            job.keeper.wait()
            if number % 2:
                os.kill(job.worker(rng.randrange(job.events("step")[-1]["count"]))["pid"], signal.SIGKILL)
            time.sleep(rng.uniform(0.0, 3.0))
            again_s = time.time()
            job.start()
            if number % 2:
                times.append(_recovered(job, again_s))
                continue
            time.sleep(1.5 * TIMEOUT_S)
            if len(job.events("start")) == generations:  # else a member had just come back, and was taken in
                pauses.append(_pause(job, since_s))
        return _row(job, times, undisturbed=f"{len(pauses)} of {MOMENTS // 2}", pause_s=round(max(pauses), 2))


def _connections(rng: random.Random) -> Row:
    with _job(apart=True) as job:
        proxy, pauses, dropped = Proxy(job.address), [], 0
        for _ in range(MEMBERS):
            job.join_another(address=proxy.address)
        job.at(30)
        for _ in range(MOMENTS):
            time.sleep(rng.uniform(1.0, 4.0))
            since_s = time.time()
            dropped += proxy.drop()
            time.sleep(1.5)
            pauses.append(_pause(job, since_s))
        assert {one["count"] for one in job.events("step")} == {MEMBERS}
        generations = len({one["pid"] for one in job.events("start")}) // MEMBERS
        return _row(job, [], dropped=dropped, generations=generations, pause_s=round(max(pauses), 2))


_PROGRAMS: dict[str, Callable[[random.Random], Row]] = {
    "kills": _kills,
    "frozen": _frozen,
    "keeper": _keeper,
    "connections": _connections,
}
