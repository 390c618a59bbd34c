"""Keep the clocks and pending updates of a store by a policy: the same board in one process, on a server and simulated.

In: reads and pushes of workers. Out: whether a read must wait, and decisions about updates. A board is a value: each
change returns a new one, so a caller that is interrupted has either the old or the new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopar.errors import StoreError
from autopar.versions.consistency.clocks import Clocks
from autopar.versions.consistency.policy import Decision, Pending, Policy
from autopar.versions.consistency.table import check_suits


@dataclass(frozen=True, slots=True)
class Board:
    """The clocks, and what was pushed and is not applied.

    Args:
        read_versions: the version that each worker read last.
        pending: pushed updates in order of arrival.
        reached: the number of complete clocks, or the highest clock at which a worker left if none is left.
        num_discarded: the number of updates discarded.
    """

    policy: Policy
    clocks: Clocks
    read_versions: tuple[int, ...]
    pending: tuple[Pending, ...] = field(default=())
    reached: int = 0
    num_discarded: int = 0

    def must_wait(self, worker: int, at_least_clock: int | None = None) -> bool:
        """Whether a worker's read must wait.

        Args:
            at_least_clock: the number of clocks that must be complete, instead of what the policy says.
        """
        floor = self.floor(worker) if at_least_clock is None else at_least_clock
        return self.reached < floor

    def floor(self, worker: int) -> int:
        """The number of clocks that must be complete for this worker to read."""
        clock = self.clocks.of(worker)
        return 0 if self.policy.catches_up and clock < self.reached else self.policy.floor(clock)

    def read(self, worker: int) -> Board:
        """After a worker has read. One that is behind the complete clock skips to it, where the policy says so."""
        clocks = self.clocks
        if self.policy.catches_up:
            clocks = clocks.advanced(worker, max(clocks.of(worker), self.reached))
        versions = (*self.read_versions[:worker], clocks.version, *self.read_versions[worker + 1 :])
        return replace(self, clocks=clocks, read_versions=versions)

    def pushed(self, worker: int) -> tuple[Board, Decision]:
        """After a worker has finished a clock, and which updates to apply and to discard now."""
        clock = self.clocks.of(worker)
        update = Pending(worker, clock, self.read_versions[worker])
        clocks = self.clocks.advanced(worker, self.policy.turn(worker, clock, self.clocks.num_workers))
        return replace(self, clocks=clocks, pending=(*self.pending, update))._decided()

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
    return Board(policy, Clocks(first), (0,) * num_workers)
