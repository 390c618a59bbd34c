"""How much a search may still do: time, or steps, or both."""

from __future__ import annotations

import time


class Budget:
    """Time and steps of a search, which schedules go by.

    Under a step limit alone a search does the same on every run, for its schedules go by steps then.

    Args:
        deadline: on the clock of `time.monotonic`.
        step_limit: None: as many as there is time for.
    """

    def __init__(self, deadline: float, step_limit: int | None = None) -> None:
        self.stopped = False
        self.deadline, self._step_limit = deadline, step_limit
        self._begin = time.monotonic()
        self._steps = 0

    def step(self, count: int = 1) -> None:
        """Note that something was done."""
        self._steps += count

    def stop(self) -> None:
        """End the search, from whatever thread."""
        self.stopped = True

    @property
    def by_steps(self) -> bool:
        """Whether schedules go by steps: then a search does the same on every run."""
        return self._step_limit is not None

    @property
    def overdue(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() >= self.deadline

    @property
    def stepped(self) -> bool:
        """Whether the steps are used up."""
        return self._step_limit is not None and self._steps >= self._step_limit

    def spent(self, more: int = 0) -> float:
        """The share of the budget that is spent, 1 where it must end.

        Args:
            more: steps that are not noted yet.
        """
        if self.stopped or self.overdue:
            return 1.0
        if self._step_limit is not None:
            return min(1.0, (self._steps + more) / max(1, self._step_limit))
        return (time.monotonic() - self._begin) / (self.deadline - self._begin)
