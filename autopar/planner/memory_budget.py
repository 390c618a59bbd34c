"""Compute how much of a device's memory budget a plan may fill.

In: bytes per device, from a hardware profile or from the user. Out: `MemoryBudget`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The part of a memory budget that a plan leaves free: for what XLA's fusion holds beyond the plan's
#: estimate, and for the allocator, whose memory is never all in one piece.
MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory budget of one device.

    >>> MemoryBudget(40e9).plan_bytes
    38000000000.0
    """

    total_bytes: float

    @property
    def plan_bytes(self) -> float:
        """The largest allowed predicted peak of a plan: the budget less a margin."""
        return self.total_bytes * (1 - MARGIN)

    @classmethod
    def with_room_for(cls, peak_bytes: float) -> MemoryBudget:
        """The smallest budget that a plan with this predicted peak fits."""
        return cls(peak_bytes / (1 - MARGIN))
