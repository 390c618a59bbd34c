"""Compute the memory that a plan may fill from a device's memory budget.

In: bytes per device, from a hardware profile or the user. Out: `MemoryBudget`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The share of a memory budget that a plan leaves free: for buffers beyond the plan's estimate, and for fragmentation in the
#: allocator.
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
        """The highest predicted peak that a plan may have."""
        return self.total_bytes * (1 - MARGIN)

    @classmethod
    def with_room_for(cls, peak_bytes: float) -> MemoryBudget:
        """The smallest budget that a plan with this predicted peak fits."""
        return cls(peak_bytes / (1 - MARGIN))
