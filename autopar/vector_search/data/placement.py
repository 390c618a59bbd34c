"""Hold the planning options of an index: mesh, hardware, memory budget, expected batch.

In: the user's options. Out: `Place`, the options with which every program of the index is planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.planner.request import requested_meshes, requested_profile

#: Working set of one loop iteration in bytes. On a CPU it fits the caches; elsewhere each iteration launches kernels,
#: so it is large enough to amortize the launch (not measured on a GPU).
CACHED_BYTES, _LAUNCHED_BYTES = 4_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """The planning options of an index.

    Args:
        options: options of `autopar.plan`: mesh, hardware, memory_budget_bytes, cache.
        batch: expected number of queries in a search.
    """

    options: Mapping[str, Any]
    batch: int

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return requested_meshes(self.options.get("mesh"), None)[0].num_devices

    @property
    def budget_bytes(self) -> float:
        """The memory budget of one device."""
        budget = self.options.get("memory_budget_bytes")
        return requested_profile(self.options.get("hardware")).usable_bytes if budget is None else float(budget)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices that a build uses: those of the mesh, or one of this process if others have some."""
        mesh = self.options.get("mesh")
        every = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else jax.devices()[: self.num_devices]
        local = tuple(each for each in every if each.process_index == jax.process_index())
        return local if len(local) == self.num_devices else (local or tuple(jax.local_devices()))[:1]

    @property
    def memory_bytes_per_s(self) -> float:
        """The memory bandwidth of all devices."""
        return requested_profile(self.options.get("hardware")).hbm_bytes_per_s * self.num_devices

    @property
    def step_bytes(self) -> int:
        """The working set of one loop iteration, on all devices."""
        is_cpu = requested_profile(self.options.get("hardware")).platform == "cpu"
        return CACHED_BYTES if is_cpu else _LAUNCHED_BYTES * self.num_devices
