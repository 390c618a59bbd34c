"""What copies in the memory of peers cost while nothing fails: FSDP on four members with one CPU device each, Gloo, with copies every
10 steps to the own agent and to one more, and without; 4,096 examples a step. Seconds per step of the second half of each run, and the median over
five interleaved runs. *bytes*: what all workers sent, and the bytes of the state times the copies.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.faults.kept_job import KeptJob

RUNS, STEPS, EVERY, MEMBERS = 5, 200, 10, 4
PROGRAM = Path(__file__).parent / "fsdp.py"


def measure() -> list[dict[str, Any]]:
    os.environ |= {"BATCH": "4096", "WIDTH": "128"}
    times: dict[int, list[float]] = {EVERY: [], 10**9: []}
    sent = state = 0
    for _ in range(RUNS):
        for every, own in times.items():
            seconds, sent_here, state = _run(every)
            own.append(seconds)
            sent = sent_here if every == EVERY else sent
    with_copies, without = (statistics.median(own) for own in times.values())
    ratios = sorted(a / b for a, b in zip(*times.values(), strict=True))
    return [
        {
            "state MB": round(state / 1e6, 1),
            "step without copies, s": round(without, 4),
            "with copies, s": round(with_copies, 4),
            "ratio of the medians": round(with_copies / without, 3),
            "ratios of the runs": ", ".join(f"{one:.3f}" for one in ratios),
            "bytes sent": sent,
            "state x copies": state * 2 * (STEPS // EVERY),
        }
    ]


def _run(every: int) -> tuple[float, int, int]:
    """Seconds per step, bytes sent by all workers, bytes of the state."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(PROGRAM), "kept", str(Path(folder) / "log"), str(STEPS), "0"]
        options = ("--every", str(every), "--ahead", "0", "--timeout", "30")
        with KeptJob(Path(folder), command, *options, members=MEMBERS) as job:
            assert job.ended(300) == 0, job.text()
            ends = [one["at_s"] for one in job.events("step")]
            ended = job.events("end")
    half = len(ends) // 2  # the first half also starts the processes that wait
    seconds = (ends[-1] - ends[half]) / (len(ends) - 1 - half)
    return seconds, sum(one["bytes"] for one in ended), ended[0]["state_bytes"]
