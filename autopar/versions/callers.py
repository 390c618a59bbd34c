"""Notice workers that make no further calls, so that others do not wait for them forever.

In: the thread of each worker's calls, and failures. Out: the workers that have stopped, each with the reason.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

#: Seconds since a worker's last call after which the end of its thread counts: another thread may go on for it.
GRACE_S = 5.0


@dataclass(slots=True)
class Callers:
    """Who called last for each worker."""

    last: dict[int, tuple[threading.Thread, float]] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)

    def called(self, worker: int) -> None:
        """A worker makes a call now, in this thread."""
        self.last[worker] = (threading.current_thread(), time.monotonic())

    def stopped(self, waiting: int | None) -> dict[int, str]:
        """The workers that make no further call while another one waits in this thread, and why."""
        found = {
            worker: f"failed ({type(error).__name__}: {str(error)[:200]})" for worker, error in self.failures.items()
        }
        me, now_s = threading.current_thread(), time.monotonic()
        for worker, (thread, since_s) in list(self.last.items()):
            if worker in (waiting, *found) or now_s - since_s < GRACE_S:
                continue
            if not thread.is_alive():
                found[worker] = "has a thread that ended without `leave`"
            elif thread is me is threading.main_thread():
                found[worker] = "is driven by this same thread"
        return found
