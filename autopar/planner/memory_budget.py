"""The memory budget of a device, and what of it a plan may fill.

In: bytes of a device, of a hardware profile or as a user gives them. Out: `MemoryBudget`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The part of a memory budget that a plan leaves free: for what XLA's fusion holds beyond the plan's
#: estimate, and for the allocator, whose memory is never all in one piece.
MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one device.

    >>> MemoryBudget(40e9).plan_bytes
    38000000000.0
    """

    total_bytes: float

    @property
    def plan_bytes(self) -> float:
        """What a plan's predicted peak may be."""
        return self.total_bytes * (1 - MARGIN)

    @classmethod
    def with_room_for(cls, peak_bytes: float) -> MemoryBudget:
        """The budget that a plan with this predicted peak keeps to."""
        return cls(peak_bytes / (1 - MARGIN))
