"""Measure the time of a step from the times of its calls, without waiting for results.

In: a note at each call. Out: seconds per step. A call only dispatches a step, but a host can be only a few steps ahead
of the devices, so over many calls the time between calls is the step time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

#: The number of calls that are remembered.
REMEMBERED = 256


class Calls:
    """The times of the last calls of one compiled program.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._settled: tuple[int, float, bool] | None = (
            None  # steps before an interruption, their time, whether the host was ahead
        )

    def note(self) -> None:
        """Record the start of a call."""
        self._times.append(self.clock())

    def restart(self) -> None:
        """Discard all calls: the next one runs another program, or follows a compilation."""
        self._times.clear()
        self._settled = None

    def interrupt(self, wait: Callable[[], None]) -> None:
        """End the measurement and keep its times: the next call differs from the others, and starts a new measurement.

        Args:
            wait: see `step_time_s`.
        """
        num_steps, found = self.num_steps, self.step_time_s(wait) if self.num_steps else None
        self._times.clear()
        self._settled = None if found is None else (num_steps, *found)

    @property
    def num_steps(self) -> int:
        """The number of measured steps, each from one call to the next."""
        settled = 0 if self._settled is None else self._settled[0]
        return max(settled, self._num_timed)

    @property
    def _num_timed(self) -> int:
        """The number of measured steps since the last `interrupt`."""
        return max(0, len(self._times) - 1)

    def step_time_s(self, wait: Callable[[], None]) -> tuple[float, bool]:
        """Seconds of a step, and whether the host was ahead of the devices.

        It is the median time between calls. If the devices are still busy long after the last call, the host was ahead:
        then it is the time until the devices are idle, divided by the number of steps.

        Args:
            wait: returns once the devices are idle.
        """
        if self._settled is not None and self._settled[0] >= self._num_timed:
            return self._settled[1:]
        times = list(self._times)
        assert len(times) > 1
        usual = median(after - before for before, after in pairwise(times))
        started = self.clock()
        wait()
        done = self.clock()
        if done - started <= 2 * usual:
            return usual, False
        return (done - times[0]) / len(times), True
