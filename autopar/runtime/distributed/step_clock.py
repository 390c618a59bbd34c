"""Time when a process calls its step and when its devices finish, with host timestamps only and without collectives.

In: calls of a step.
Out: `StepTimes`: how long steps take, and how long the process lets its devices wait between them. Steps take equally
long on all processes, because they wait for each other in collectives. A straggler shows in the time between the end of
a step, which all processes share, and its own start of the next.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

#: The number of steps per measurement.
WINDOW = 50


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over the last steps, in seconds.

    Args:
        num_steps: the number of measured steps.
        step_s: the time from the start of one call to the start of the next.
        late_s: the time from the end of a step on the devices to the next call; 0 if the host runs ahead.
        device_s: the time from the start of a step on the devices to its end, including waiting for other processes.
    """

    num_steps: int
    step_s: float
    late_s: float
    device_s: float


class StepClock:
    """Times the calls of one step. A separate thread waits for results."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_calls = 0
        self._running = False
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._results: queue.SimpleQueue[tuple[float, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._wait_for_results, name=f"autopar clock of {name}", daemon=True).start()

    @property
    def in_call(self) -> bool:
        """Whether the process is inside a call of the step."""
        return self._running

    def timed(self, call: Callable[[], Any], probe: Callable[[Any], Any]) -> Any:
        """Make a call and time it.

        Args:
            probe: a function that picks an array of the result to wait for, one that no later call donates, or None.
        """
        self.num_calls += 1
        self._running, started = True, time.perf_counter()
        try:
            result = call()
        finally:
            self._running = False
        self._results.put((started, probe(result)))
        return result

    def times(self) -> StepTimes | None:
        """The medians of the last steps; None before there are two."""
        samples = list(self._samples)
        if not samples:
            return None
        return StepTimes(len(samples), *(statistics.median(column) for column in zip(*samples, strict=True)))

    def stop(self) -> None:
        self._results.put(None)

    def _wait_for_results(self) -> None:
        before: tuple[float, float] | None = None
        while (item := self._results.get()) is not None:
            started, result = item
            try:
                jax.block_until_ready(result)
            except Exception:  # the caller gets the same error and can handle it
                before = None
                continue
            ready = time.perf_counter()
            if before is not None:
                started_before, ready_before = before
                late, device = max(0.0, started - ready_before), ready - max(started, ready_before)
                self._samples.append((started - started_before, late, device))
            before = (started, ready)
