"""Limit a search by time, by steps, or by both."""

from __future__ import annotations

import time


class Budget:
    """The time and steps that a search may use.

    With a step limit the search's schedules count steps, so a search that does not run out of time is deterministic.

    Args:
        deadline: end of the search, by `time.monotonic`.
        step_limit: largest number of steps; None for no limit.
    """

    def __init__(self, deadline: float, step_limit: int | None = None) -> None:
        self.stopped = False
        self.deadline, self._step_limit = deadline, step_limit
        self._begin = time.monotonic()
        self._steps = 0

    def step(self, count: int = 1) -> None:
        """Count steps."""
        self._steps += count

    def stop(self) -> None:
        """End the search; any thread may call this."""
        self.stopped = True

    @property
    def by_steps(self) -> bool:
        """Whether schedules count steps, which makes a search deterministic."""
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
        """The share of the budget that is spent; 1 ends the search.

        Args:
            more: steps not yet counted by `step`.
        """
        if self.stopped or self.overdue:
            return 1.0
        if self._step_limit is not None:
            return min(1.0, (self._steps + more) / max(1, self._step_limit))
        return (time.monotonic() - self._begin) / (self.deadline - self._begin)
