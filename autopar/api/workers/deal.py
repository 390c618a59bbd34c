"""Deal the shares of batches to workers in threads: which worker gets which examples.

In: batches, as the user gives them. Out: for each worker the next share. Where the policy bounds how far workers drift apart, worker j
takes share j of batch i in its iteration i, so that each worker has the same part of every batch. Where it does not, a worker takes the
next share that is left, so that no batch waits for a slow worker.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from autopar.api.workers.work import Share


@dataclass(slots=True)
class Deal:
    """The shares that are not taken yet, for the threads of one stream.

    Args:
        num_workers: of the stream.
        is_fixed: whether worker j takes share j.

    Attributes:
        changed: notified when shares arrive, are wanted, or end; also for results of the stream.
        num_batches: the number of batches dealt.
        is_over: whether there are no further batches.
        at: for each worker, the number of the batch that it takes or waits for next.
    """

    num_workers: int
    is_fixed: bool
    changed: threading.Condition = field(default_factory=threading.Condition)
    num_batches: int = 0
    is_over: bool = False
    at: dict[int, int] = field(default_factory=dict)
    _shares: dict[int, list[Share]] = field(default_factory=dict)
    _left: deque[tuple[tuple[int, int], Share]] = field(default_factory=deque)  # with batch and number
    _taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    _done: set[tuple[int, int]] = field(default_factory=set)  # before a restart
    _waiting: dict[int, int] = field(default_factory=dict)  # worker -> number of its batch

    def add(self, shares: list[Share]) -> None:
        """Add a batch. After a restart, only shares that were not computed before are dealt."""
        with self.changed:
            number = self.num_batches
            if self.is_fixed:
                self._shares[number] = shares
            else:
                self._left.extend(
                    ((number, n), share) for n, share in enumerate(shares) if (number, n) not in self._done
                )
                self._done = {one for one in self._done if one[0] > number}
            self.num_batches += 1
            self.changed.notify_all()

    def not_computed(self) -> list[tuple[int, int]]:
        """Batch and number of the shares that are dealt on demand and not computed."""
        return sorted([*(which for which, _ in self._left), *self._taken.values()])

    def computed(self, worker: int) -> None:
        """A worker has computed the share that it took."""
        self._taken.pop(worker, None)

    def restart(self, first: int, not_computed: Collection[tuple[int, int]], num_batches: int) -> None:
        """Go on where another deal ended.

        Args:
            first: the number of the next batch that is added.
            not_computed: of the other deal, which had dealt `num_batches`.
        """
        self.num_batches = first
        every = ((batch, n) for batch in range(first, num_batches) for n in range(self.num_workers))
        self._done = set(every) - set(not_computed)

    def end(self) -> None:
        """Say that there are no further batches. What is dealt is still computed."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def leave(self, worker: int) -> None:
        """A worker takes no further share."""
        with self.changed:
            self.at.pop(worker, None)
            self._waiting.pop(worker, None)
            self._forget()
            self.changed.notify_all()

    @property
    def wants_batch(self) -> bool:
        """Whether a worker waits for a batch that was not given yet."""
        if self.is_over:
            return False
        if self.is_fixed:
            return any(number not in self._shares for number in self._waiting.values())
        return len(self._waiting) > len(self._left)

    def take(self, worker: int, iteration: int) -> Share | None:
        """The worker's next share, as soon as there is one; None at the end."""
        with self.changed:
            self.at[worker] = iteration
            self._forget()
            while not self._has(worker, iteration):
                if self.is_over:
                    return None
                self._waiting[worker] = iteration
                self.changed.notify_all()
                self.changed.wait()
            self._waiting.pop(worker, None)
            if self.is_fixed:
                return self._shares[iteration][worker]
            self._taken[worker], share = self._left.popleft()
            return share

    def _has(self, worker: int, iteration: int) -> bool:
        return iteration in self._shares if self.is_fixed else bool(self._left)

    def _forget(self) -> None:
        """Drop batches that all workers have passed."""
        if self.is_fixed and len(self.at) == self.num_workers:
            oldest = min(self.at.values())
            for number in [number for number in self._shares if number < oldest]:
                del self._shares[number]
