"""Measure the time of a step from the times of its calls, without waiting for results.

In: a note at each call. Out: seconds from call to call. A call only dispatches the step. But a host can be only a
limited number of steps ahead of the devices, so in the long run the time between calls is the time of a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

#: The number of recorded calls.
REMEMBERED = 256


class Calls:
    """The times of the last calls of one compiled program.

    Args:
        clock: a function that returns seconds.
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
        """Forget all calls, because the next one belongs to another program or follows a compilation."""
        self._times.clear()
        self._settled = None

    def interrupt(self, wait: Callable[[], None]) -> None:
        """Keep the measurement and start a new one, because the next call is unlike the others.

        Args:
            wait: the argument of `step_time_s`.
        """
        num_steps, found = self.num_steps, self.step_time_s(wait) if self.num_steps else None
        self._times.clear()
        self._settled = None if found is None else (num_steps, *found)

    @property
    def num_steps(self) -> int:
        """The number of timed steps in the measurement that counts: the one before the last interruption or the current
        one."""
        settled = 0 if self._settled is None else self._settled[0]
        return max(settled, self._num_timed)

    @property
    def _num_timed(self) -> int:
        """The number of timed steps since the last interruption."""
        return max(0, len(self._times) - 1)

    def step_time_s(self, wait: Callable[[], None]) -> tuple[float, bool]:
        """Seconds of a step, and whether the host was ahead of the devices.

        It is the median from call to call. If the devices still have much to do after the last call, the calls were
        faster than the steps. Then it is the time until the devices are idle, divided by the number of steps.

        Args:
            wait: a function that returns once the devices are idle.
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
