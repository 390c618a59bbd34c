"""Define the vector of workers' clocks, on which every consistency policy is a function.

A worker's clock is the number of clocks that it has finished: it computes an update of clock c, and then its clock is
c + 1. A version of the weights is the number of updates applied to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import StoreError


@dataclass(frozen=True, slots=True)
class Clocks:
    """What a policy sees of a store.

    Args:
        vector: the clock of each worker; None for one that has left.
        version: the number of updates applied.
        applied: for policies that apply the updates of one clock together, the number of clocks applied.
    """

    vector: tuple[int | None, ...]
    version: int = 0
    applied: int = 0

    @property
    def num_workers(self) -> int:
        """The number of workers at the start."""
        return len(self.vector)

    @property
    def members(self) -> tuple[int, ...]:
        """The clocks of the workers that have not left."""
        return tuple(clock for clock in self.vector if clock is not None)

    def of(self, worker: int) -> int:
        """The clock of one worker.

        Raises:
            StoreError: there is no such worker, or it has left.
        """
        if not isinstance(worker, int) or isinstance(worker, bool) or not 0 <= worker < self.num_workers:
            numbers = "0" if self.num_workers == 1 else f"0 to {self.num_workers - 1}"
            raise StoreError(f"there is no worker {worker!r}: the store was made for workers {numbers} (`workers=`)")
        clock = self.vector[worker]
        if clock is None:
            raise StoreError(f"worker {worker} has left the store: a worker makes no calls after `leave`")
        return clock

    def staleness(self, worker: int) -> int:
        """By how many clocks the slowest worker is behind this one; 0 for the slowest."""
        return self.of(worker) - min(self.members)

    def advanced(self, worker: int, clock: int) -> Clocks:
        """These clocks with one worker's at `clock`.

        Raises:
            StoreError: the clock would go backward.
        """
        if clock < self.of(worker):
            raise StoreError(
                f"the clock of worker {worker} is {self.of(worker)} and cannot go back to {clock}: an update of an earlier"
                " clock was pushed already"
            )
        return replace(self, vector=(*self.vector[:worker], clock, *self.vector[worker + 1 :]))

    def without(self, worker: int) -> Clocks:
        """These clocks after a worker has left."""
        self.of(worker)
        return replace(self, vector=(*self.vector[:worker], None, *self.vector[worker + 1 :]))
