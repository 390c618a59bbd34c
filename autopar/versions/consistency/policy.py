"""Define an entry of the table of consistency policies.

A policy says which clock a read must have seen, which pushed updates to apply and which to discard, and in which clocks
a worker takes part. All are functions on the clocks of the workers and the pending updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.versions.consistency.clocks import Clocks


@dataclass(frozen=True, slots=True)
class Pending:
    """An update that a worker has pushed, and that is neither applied nor discarded.

    Args:
        clock: the worker's clock in which it was computed.
        read_version: the version of the weights that it was computed from.
    """

    worker: int
    clock: int
    read_version: int

    def age(self, clocks: Clocks) -> int:
        """The number of updates applied since its weights were read."""
        return clocks.version - self.read_version


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with pending updates; those that are not mentioned stay pending.

    Args:
        groups: in the order in which to apply them; the updates of one group are summed in the order given, and make
            one version.
        discarded: updates to forget.
    """

    groups: tuple[tuple[Pending, ...], ...] = ()
    discarded: tuple[Pending, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a worker's update that belongs to one key.

    Args:
        magnitude: the mean absolute value of its elements.
        held: the number of clocks for which it has been held back; 0 for an update of this clock alone.
    """

    key: str
    num_bytes: int
    magnitude: float
    held: int


def of_all(clocks: Clocks) -> float:
    """The number of clocks that all workers have finished; infinite without workers."""
    return min(clocks.members, default=math.inf)


def each_alone(clocks: Clocks, pending: Sequence[Pending]) -> Decision:
    """Apply each update when it arrives."""
    return Decision(tuple((update,) for update in pending))


def next_clock(worker: int, clock: int, num_workers: int) -> int:
    """Take part in every clock."""
    return clock + 1


def any_number(num_workers: int) -> str | None:
    """Suit any number of workers."""
    return None


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to keep workers consistent.

    Args:
        name: as `find` takes it.
        slack: a worker at clock c reads once clock c - slack is complete; infinite if it never waits.
        complete: from the clocks, the number of clocks that are complete.
        decide: from the clocks and the pending updates in order of arrival, which to apply and which to discard.
        turn: from a worker, a clock and the number of workers, the next clock in which the worker takes part.
        catches_up: whether a worker that is behind the complete clock skips to it when it reads.
        period: the iterations of a worker for each of its clocks: it pulls and pushes once in them.
        send: from the parts of a worker's update, those that are sent in this clock, in order; the rest is held back
            and added to the update of the next clock. None sends everything.
        hold: the most clocks for which `send` holds a part back.
        unmet: from a number of workers, why the policy is not defined for it and the way out; None if it is.
    """

    name: str
    slack: float
    complete: Callable[[Clocks], float] = of_all
    decide: Callable[[Clocks, Sequence[Pending]], Decision] = each_alone
    turn: Callable[[int, int, int], int] = next_clock
    catches_up: bool = False
    period: int = 1
    send: Callable[[Sequence[Part]], Sequence[Part]] | None = None
    hold: int = 0
    unmet: Callable[[int], str | None] = any_number

    @property
    def bound(self) -> float:
        """The most clocks by which a read lags: it has seen every update of a worker's clock c - bound - 1 and earlier
        ones that was not discarded."""
        return self.slack + self.hold

    def floor(self, clock: int) -> int:
        """The number of clocks that must be complete for a worker at `clock` to read."""
        return 0 if math.isinf(self.slack) else max(0, clock - int(self.slack))

    def __str__(self) -> str:
        return self.name
