"""Define the entries of the table of collectives.

In: a payload, axes, mesh, hardware profile, together a `Call`. Out: a `Collective`, an entry of the table in
`collectives`, whose formula predicts the time of a `Call`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.hardware.profile import HardwareProfile, LinkProfile
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding_changes import Change


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a collective's cost formula.

    Args:
        num_bytes: payload, as the table in `collectives` defines it.
        share: share of launch and latency that it pays; below 1 if it is merged with others.
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
        """The slowest link that it crosses."""
        return link_of(self.axes, self.mesh, self.profile)


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective.

    Args:
        name: HLO's name, or the name under which a user registered it.
        change: change of sharding that it makes.
        seconds: cost formula.
        is_sum: whether it is a reduction; XLA merges reductions of one dtype only.
        gives_part: whether each device's result is one part of the payload.
        is_merged: whether XLA merges it with others of its kind.
        run: function of a user's collective that runs it on one device's part; None for XLA's own.
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
        """Whether it is a reduction whose whole result every device gets."""
        return self.is_sum and not self.gives_part


def link_of(axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile) -> LinkProfile:
    """The slowest link that a collective over these axes crosses.

    The mesh orders devices row-major and fills NVLink domains in order. An axis therefore stays inside a domain exactly
    if the block it spans (its size times its stride) divides a domain.
    """
    domain = profile.domain_in(mesh.num_devices)
    if mesh.num_devices > domain:
        for axis in axes:
            span = mesh.size(axis) * mesh.stride(axis)
            if span > domain or domain % span:
                return profile.network_link
    return profile.host_link
