"""What is known of a kind of collective.

In: a payload, axes, mesh, hardware profile. Out: `Collective`, an entry of the table in `collectives`, whose formula prices a
`Call`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.cost.hardware_profile import HardwareProfile, LinkProfile
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding_changes import Change


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as a formula sees it.

    Args:
        num_bytes: its payload, by the table of `collectives`.
        share: of the launch and the latencies that it pays: less than all where it is merged with others.
    """

    num_bytes: float
    axes: tuple[str, ...]
    mesh: MeshShape
    profile: HardwareProfile
    share: float

    @property
    def num_devices(self) -> int:
        return self.mesh.sizes(self.axes)

    @property
    def link(self) -> LinkProfile:
        """The slowest that it crosses."""
        return link_of(self.axes, self.mesh, self.profile)


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective.

    Args:
        name: HLO's, or a user's own.
        change: of a sharding that it makes.
        seconds: its formula.
        is_sum: it adds up what devices have, so that only terms of one dtype are merged.
        gives_part: its result is one part of its payload on each device.
        is_merged: XLA merges it with its like.
        run: of a user's own, the function that runs it on one device's part; XLA's otherwise.
    """

    name: str
    change: Change
    seconds: Callable[[Call], float]
    is_sum: bool = False
    gives_part: bool = False
    is_merged: bool = True
    run: Callable[..., Any] | None = None

    @property
    def sums_whole(self) -> bool:
        """Whether every device ends with the whole sum."""
        return self.is_sum and not self.gives_part


def link_of(axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile) -> LinkProfile:
    """The slowest link a collective over these axes must cross.

    Devices are laid row-major over the mesh, hosts are filled in order; so an axis stays inside a
    host exactly if the block it spans (its size times its stride) divides a host.
    """
    for axis in axes:
        span = mesh.size(axis) * mesh.stride(axis)
        if span > profile.devices_per_host or profile.devices_per_host % span:
            return profile.network_link if mesh.num_devices > profile.devices_per_host else profile.host_link
    return profile.host_link
