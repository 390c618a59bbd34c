"""Where an index is to lie.

In: what the user asked for. Out: `Place`: the options that every program of the index is planned with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.planner.request import requested_meshes, requested_profile

#: What one step of a loop may touch, in bytes: on a CPU what stays in its caches; elsewhere, where each step is launched
#: anew, as much as makes that worth it (not measured on a GPU).
CACHED_BYTES, _LAUNCHED_BYTES = 4_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where an index is to lie, as asked for.

    Args:
        options: of `autopar.plan`: mesh, hardware, memory_budget_bytes, cache.
        batch: queries that a search is expected to have.
    """

    options: Mapping[str, Any]
    batch: int

    @property
    def num_devices(self) -> int:
        """Of the mesh."""
        return requested_meshes(self.options.get("mesh"), None)[0].num_devices

    @property
    def budget_bytes(self) -> float:
        """Of one device."""
        asked = self.options.get("memory_budget_bytes")
        return requested_profile(self.options.get("hardware")).usable_bytes if asked is None else float(asked)

    @property
    def step_bytes(self) -> int:
        """That one step of a loop may touch on all devices."""
        is_cpu = requested_profile(self.options.get("hardware")).platform == "cpu"
        return CACHED_BYTES if is_cpu else _LAUNCHED_BYTES * self.num_devices
