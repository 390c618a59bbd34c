"""A member that is slower than the others: the microbatches of each batch are dealt again by measured speed. FSDP on two members with one
CPU device each, Gloo, 12 microbatches of 4,608 examples; one member is stopped for half of the time (SIGSTOP and SIGCONT every 20 ms).

*equal*: steps with the deal of the start. *dealt*: steps with the deal by speed. Median seconds per step of each. *best*: what the deal predicts from
the ratio of the speeds. The losses of all steps are compared with those of one device without faults.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults import fsdp
from benchmarks.faults.kept_job import KeptJob, losses
from benchmarks.faults.survival import worst_difference

MICROBATCHES, STEPS = 12, 60
PROGRAM = Path(__file__).parent / "fsdp.py"


class Throttle:
    """Stops a process for half of the time, until it is closed.

    Args:
        pid: its number now; None if there is none.
    """

    def __init__(self, pid: Callable[[], int | None], period_s: float = 0.04) -> None:
        self._pid, self._period_s = pid, period_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the process run."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            pid = self._pid()
            for number in (signal.SIGSTOP, signal.SIGCONT):
                with contextlib.suppress(OSError):  # it has just ended
                    if pid is not None:
                        os.kill(pid, number)
                time.sleep(self._period_s / 2)


def measure() -> list[dict[str, Any]]:
    os.environ |= {"BATCH": "4608", "WIDTH": "128"}  # of the members; here it is imported already
    fsdp.BATCH, fsdp.WIDTH = 4608, 128
    with tempfile.TemporaryDirectory() as folder:
        return [measured(Path(folder), "4608")]


def measured(folder: Path, batch: str, steps: int = STEPS) -> dict[str, Any]:
    """One run, with the throttled member."""
    command = [str(PROGRAM), "kept", str(folder / "log"), "1000000", "0"]
    options = ("--ahead", "0", "--timeout", "20", "--microbatches", str(MICROBATCHES))
    with KeptJob(folder, command, *options, members=2) as job:
        job.at(3)
        slow = job.worker(1)["agent"]

        def pid() -> int | None:
            own = [one["pid"] for one in job.events("start") if one["agent"] == slow]
            return own[-1] if own else None

        throttle = Throttle(pid)
        try:
            job.wait(lambda: "members differ in speed" in job.text(), 240)
            job.wait(lambda: len({_deal(one) for one in job.events("step")}) > 1)
            job.at(job.events("step")[-1]["step"] + steps // 2)
            job.wait(
                lambda: sum(_deal(one) == _deal(job.events("step")[-1]) for one in job.events("step")) > steps // 2
            )
        finally:
            throttle.close()
        done = job.events("step")
        first, last = _deal(done[0]), _deal(done[-1])
        of = {deal: [one["at_s"] - one["began_s"] for one in done if _deal(one) == deal] for deal in (first, last)}
        equal_s, dealt_s = (statistics.median(of[deal][5:]) for deal in (first, last))
        return {
            "batch": batch,
            "equal": _text(first),
            "equal, s": round(equal_s, 4),
            "dealt": _text(last),
            "dealt, s": round(dealt_s, 4),
            "ratio": round(equal_s / dealt_s, 2),
            "best": round(2 * first[1] / max(last[0], 2 * last[1]), 2),
            "largest difference of a loss": f"{worst_difference(losses(done)):.1g}",
        }


def _deal(step: dict[str, Any]) -> tuple[int, ...]:
    return tuple(step["microbatches"])


def _text(deal: tuple[int, ...]) -> str:
    return " and ".join(map(str, deal))
