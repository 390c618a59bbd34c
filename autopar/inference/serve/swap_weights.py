"""Keep the weights of some engines on the devices, and those of the others in the host's memory.

In: engines on the same devices, with their priorities; the bytes of weights that have room at once. Out: `Swapping`. An engine with requests whose
weights are on the host takes the place of engines that have none, the least recently used first, or that have a lower priority.
Requests of an engine that loses its place wait, with the tokens that they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autopar.errors import InferenceError
from autopar.inference.serve.iterations import Iterations

#: An engine that has waited for so many iterations of others may take the place of one of the same priority.
_PATIENCE = 256


class Swappable(Protocol):
    """The weights of an engine (`Weights`)."""

    is_swapped: bool

    def swap_out(self) -> None:
        """Move them to the host."""
        ...

    def swap_in(self) -> None:
        """Move them to the devices."""
        ...


@dataclass(eq=False, slots=True)
class Swapped:
    """An engine.

    Args:
        num_bytes: of its weights on one device. priority: a lower number goes first.
        used: when it last ran, counted in iterations of all. waiting_since: when its requests began to wait for a place; None if they do not.
    """

    iterations: Iterations
    weights: Swappable
    num_bytes: int
    priority: int
    used: int = 0
    waiting_since: int | None = None

    @property
    def is_awake(self) -> bool:
        return not self.iterations.runner.is_asleep


class Swapping:
    """The places of engines' weights.

    Args:
        budget_bytes: the weights that have room on one device at once.
    """

    def __init__(self, budget_bytes: float) -> None:
        self._budget = budget_bytes
        self._members: list[Swapped] = []
        self._now = 0

    def add(self, member: Swapped) -> None:
        """Add an engine whose weights are on the devices."""
        self._members.append(member)

    def remove(self, own: Iterations) -> None:
        """An engine is closed."""
        self._members = [member for member in self._members if member.iterations is not own]

    def note_run(self, own: Iterations) -> None:
        """An engine has run an iteration."""
        self._now += 1
        for member in self._members:
            if member.iterations is own:
                member.used, member.waiting_since = self._now, None

    def wake(self, own: Iterations) -> bool:
        """Bring back the weights of an engine that has requests, if there is a place for them or one can be taken."""
        member = next((each for each in self._members if each.iterations is own), None)
        if member is None or member.is_awake or not own.generations or not member.weights.is_swapped:
            return False
        if member.waiting_since is None:
            member.waiting_since = self._now
        is_late = self._now - member.waiting_since > _PATIENCE
        if not self._made_room(member.num_bytes, member.priority - is_late):
            return False
        member.weights.swap_in()
        member.waiting_since, member.used = None, self._now
        return True

    def make_room(self, num_bytes: int) -> None:
        """Make room for the weights of a new engine.

        Raises:
            InferenceError: they exceed the budget.
        """
        if num_bytes > self._budget:
            raise InferenceError(
                f"the weights have {num_bytes:,} bytes on a device, and the pool's engines may have {self._budget:,.0f} at once: raise"
                " `weights_bytes`"
            )
        highest = min((each.priority for each in self._members), default=0)
        self._made_room(num_bytes, highest - 1)

    def _made_room(self, num_bytes: int, priority: int) -> bool:
        """Whether there is a place, after engines were put to sleep; without a change if not."""
        awake = [each for each in self._members if each.is_awake]
        missing = sum(each.num_bytes for each in awake) + num_bytes - self._budget
        leaving: list[Swapped] = []
        for each in sorted(awake, key=lambda one: (bool(one.iterations.generations), -one.priority, one.used)):
            if missing > 0 and (not each.iterations.generations or each.priority > priority):
                leaving.append(each)
                missing -= each.num_bytes
        if missing > 0:
            return False
        for each in leaving:
            each.weights.swap_out()
        return True
