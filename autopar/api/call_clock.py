"""When a step was called: so that its time is known without waiting for any of its results.

In: a note at each call. Out: seconds from call to call. A call only hands the step to the devices and returns; but a
host can be no more than some steps ahead, so in the long run calls follow one another as steps end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

#: Calls that are remembered: the last ones.
REMEMBERED = 256


class Calls:
    """The times of the last calls of one compiled program.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._settled: tuple[int, float, bool] | None = None  # steps timed before an interruption, and what they told

    def note(self) -> None:
        """A call begins."""
        self._times.append(self.clock())

    def start_anew(self) -> None:
        """Forget all: the next call is the first of another program, or the first after compiling."""
        self._times.clear()
        self._settled = None

    def interrupt(self, wait: Callable[[], None]) -> None:
        """A call comes that is unlike the others: what they have told is kept, and the next is the first of new ones.

        Args:
            wait: as for `step_time_s`.
        """
        num_steps, found = self.num_steps, self.step_time_s(wait) if self.num_steps else None
        self._times.clear()
        self._settled = None if found is None else (num_steps, *found)

    @property
    def num_steps(self) -> int:
        """Steps whose time is known: from one call to the next."""
        settled = 0 if self._settled is None else self._settled[0]
        return max(settled, self._num_timed)

    @property
    def _num_timed(self) -> int:
        """Since the last interruption."""
        return max(0, len(self._times) - 1)

    def step_time_s(self, wait: Callable[[], None]) -> tuple[float, bool]:
        """Seconds of a step, and whether the host was ahead of the devices.

        The median from call to call. Where the devices still had much to do after the last call, the calls followed one
        another faster than the steps: then all that time by the number of steps.

        Args:
            wait: returns once the devices have done all that was asked of them.
        """
        if self._settled is not None and self._settled[0] >= self._num_timed:
            return self._settled[1:]
        times = list(self._times)
        assert len(times) > 1
        usual = median(after - before for before, after in pairwise(times))
        asked = self.clock()
        wait()
        done = self.clock()
        if done - asked <= 2 * usual:
            return usual, False
        return (done - times[0]) / len(times), True
