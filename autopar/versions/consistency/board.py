"""Keep the clocks and pending updates of a store by a policy: the same board in one process, on a server and simulated.

In: reads and pushes of workers. Out: whether a read must wait, and decisions about updates. A board is a value: each
change returns a new one, so a caller that is interrupted has either the old or the new one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopar.errors import StoreError
from autopar.versions.consistency.clocks import Clocks
from autopar.versions.consistency.policy import Decision, Pending, Policy
from autopar.versions.consistency.table import check_suits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Board:
    """The clocks, and what was pushed and is not applied.

    Args:
        read_versions: for each worker, the version of its first read in its last clock with a read.
        has_read: for each worker, whether it has read in its present clock.
        pending: pushed updates in order of arrival.
        reached: the number of complete clocks, or the highest clock at which a worker left if none is left.
        num_discarded: the number of updates discarded.
    """

    policy: Policy
    clocks: Clocks
    read_versions: tuple[int, ...]
    has_read: tuple[bool, ...]
    pending: tuple[Pending, ...] = field(default=())
    reached: int = 0
    num_discarded: int = 0

    def must_wait(self, worker: int | None, at_least_clock: int = 0) -> bool:
        """Whether a worker's read must wait.

        Args:
            at_least_clock: a number of clocks that must be complete, if that is more than the policy requires.
        """
        return self.reached < self.floor(worker, at_least_clock)

    def floor(self, worker: int | None, at_least_clock: int = 0) -> int:
        """The number of clocks that must be complete for a worker to read; None for a reader that is no worker."""
        return at_least_clock if worker is None else max(at_least_clock, self.policy.floor(self.clocks.of(worker)))

    def read(self, worker: int) -> Board:
        """After a worker has read. One that is behind the complete clock skips to it, where the policy says so."""
        clocks = self.clocks
        if self.policy.catches_up:
            clocks = clocks.advanced(worker, max(clocks.of(worker), self.reached))
        if self.has_read[worker]:
            return self if clocks == self.clocks else replace(self, clocks=clocks)
        return replace(
            self,
            clocks=clocks,
            read_versions=_with(self.read_versions, worker, clocks.version),
            has_read=_with(self.has_read, worker, True),
        )

    def pushed(self, worker: int) -> tuple[Board, Decision]:
        """After a worker has finished a clock, and which updates to apply and to discard now."""
        clock = self.clocks.of(worker)
        update = Pending(worker, clock, self.read_versions[worker])
        clocks = self.clocks.advanced(worker, self.policy.turn(worker, clock, self.clocks.num_workers))
        has_read = _with(self.has_read, worker, False)
        return replace(self, clocks=clocks, pending=(*self.pending, update), has_read=has_read)._decided()

    def left(self, worker: int) -> tuple[Board, Decision]:
        """After a worker has left: nobody waits for it any more."""
        last = max(self.reached, self.clocks.of(worker))
        after = replace(self, clocks=self.clocks.without(worker))
        return replace(after, reached=last)._decided() if not after.clocks.members else after._decided()

    def slowest(self) -> list[int]:
        """The workers that have not finished the first clock that is not complete."""
        return [
            worker for worker, clock in enumerate(self.clocks.vector) if clock is not None and clock <= self.reached
        ]

    def can_reach(self, clock: int, stopped: Collection[int]) -> bool:
        """Whether so many clocks can still be complete if these workers finish no further clock."""
        if clock <= self.reached:
            return True
        vector = tuple(c if c is None or worker in stopped else clock for worker, c in enumerate(self.clocks.vector))
        return bool(self.clocks.members) and self.policy.complete(replace(self.clocks, vector=vector)) >= clock

    def _decided(self) -> tuple[Board, Decision]:
        complete = self.policy.complete(self.clocks)
        reached = self.reached if math.isinf(complete) else max(self.reached, int(complete))
        decision = self.policy.decide(self.clocks, self.pending)
        over = {*decision.discarded, *(update for group in decision.groups for update in group)}
        applied = max((group[0].clock + 1 for group in decision.groups), default=0)
        clocks = replace(
            self.clocks,
            version=self.clocks.version + len(decision.groups),
            applied=max(self.clocks.applied, applied),
        )
        after = replace(
            self,
            clocks=clocks,
            reached=reached,
            pending=tuple(update for update in self.pending if update not in over),
            num_discarded=self.num_discarded + len(decision.discarded),
        )
        return after, decision


def board_of(policy: Policy, num_workers: int) -> Board:
    """The board of a store that nobody has read or pushed to.

    Raises:
        StoreError: the policy is not defined for this number of workers.
    """
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise StoreError(f"`workers` is {num_workers!r}: a store needs a whole number of workers, at least 1")
    check_suits(policy, num_workers)
    first = tuple(policy.turn(worker, -1, num_workers) for worker in range(num_workers))
    return Board(policy, Clocks(first), (0,) * num_workers, (False,) * num_workers)


def _with(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
