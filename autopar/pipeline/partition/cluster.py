"""Model a cluster, and enumerate the submeshes for stages.

In: groups of hosts; each group has one kind of device.
Out: a `Cluster`, the shapes of its submeshes, and a `Line` for each order of the groups, with every possible submesh. A
submesh is a run of devices inside one host, or several whole hosts of one group. So it never mixes kinds of devices,
and never combines a part of a host with another host. Which submeshes fit together: `packing.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autopar.errors import ClusterError

_MOST_GROUPS = 4  # every order of them is searched


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Identical hosts.

    Args:
        kind: the kind of device, a name of a hardware profile.
        num_hosts: the number of hosts, at least 1.
        devices_per_host: the number of devices per host, at least 1.
    """

    kind: str
    num_hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.num_hosts}x{self.devices_per_host} {self.kind}"


@dataclass(frozen=True, slots=True)
class SubmeshShape:
    """The properties of a submesh that determine the cost of a stage, independent of its position.

    Args:
        kind: the kind of device.
        num_hosts: the number of hosts; more than 1 only for whole hosts.
        devices_per_host: the number of devices per host.
        parts: the number of equal parts for branches of a model (`branches.py`); 1 for one mesh.
        option: a number that distinguishes ways to run a stage at different costs, for example faster or with less
            memory.
    """

    kind: str
    num_hosts: int
    devices_per_host: int
    parts: int = 1
    option: int = 0

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    @property
    def without_option(self) -> SubmeshShape:
        """The shape with option 0."""
        return replace(self, option=0)

    def __str__(self) -> str:
        size = f"{self.num_hosts}x{self.devices_per_host}" if self.num_hosts > 1 else f"{self.devices_per_host}"
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{size} {self.kind}{parts}" + (f", option {self.option}" if self.option else "")


@dataclass(frozen=True, slots=True)
class Submesh:
    """A shape at a position: the devices from `first_device` on; the first of them is on host `first_host`."""

    shape: SubmeshShape
    first_device: int
    first_host: int

    @property
    def devices(self) -> range:
        """The device numbers, host after host in the order of the cluster's groups."""
        return range(self.first_device, self.first_device + self.shape.num_devices)

    def shares_host(self, other: Submesh) -> bool:
        """Whether both are inside the same host."""
        alone = self.shape.num_hosts == other.shape.num_hosts == 1
        return alone and self.first_host == other.first_host


class Placed(Protocol):
    """A stage on a submesh, with the submeshes of its other replicas."""

    @property
    def submesh(self) -> Submesh: ...
    @property
    def replicas(self) -> tuple[Submesh, ...]: ...


def submeshes_of(stages: Sequence[Placed]) -> tuple[Submesh, ...]:
    """The submeshes of stages, by the numbers that schedules give them: those of the first replicas in the order of the
    stages, then any others."""
    found: dict[range, Submesh] = {}
    for submesh in (*(stage.submesh for stage in stages), *(one for stage in stages for one in stage.replicas)):
        found.setdefault(submesh.devices, submesh)
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices.

    Raises:
        ClusterError: no group, a number below 1, two groups of identical hosts, or too many groups.

    >>> cluster = Cluster((DeviceGroup("a100", 1, 4), DeviceGroup("v100", 2, 2)))
    >>> cluster.num_devices, str(cluster)
    (8, '1x4 a100 + 2x2 v100')
    """

    groups: tuple[DeviceGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ClusterError(
                "a cluster without devices: give at least one DeviceGroup(kind, num_hosts, devices_per_host)"
            )
        for group in self.groups:
            if not group.kind:
                raise ClusterError(f"{group!r}: a group needs a kind of device, the name of a hardware profile")
            for name in ("num_hosts", "devices_per_host"):
                value = getattr(group, name)
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ClusterError(f"{group!r}: `{name}` must be a whole number of at least 1; got {value!r}")
        for one, other in itertools.combinations(self.groups, 2):
            if (one.kind, one.devices_per_host) == (other.kind, other.devices_per_host):
                raise ClusterError(
                    f"two groups of hosts with {one.devices_per_host} {one.kind}, {one} and {other}: merge them into"
                    f" DeviceGroup({one.kind!r}, {one.num_hosts + other.num_hosts}, {one.devices_per_host})"
                )
        if len(self.groups) > _MOST_GROUPS:
            raise ClusterError(
                f"{len(self.groups)} groups of hosts; at most {_MOST_GROUPS}, because every order is tried"
            )

    @property
    def num_devices(self) -> int:
        """The number of devices of all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices, without duplicates."""
        return tuple(dict.fromkeys(group.kind for group in self.groups))

    def shapes(self) -> tuple[SubmeshShape, ...]:
        """All possible shapes of submeshes with one part and one option, the largest first."""
        found: dict[SubmeshShape, None] = {}
        for group in self.groups:
            inside = [SubmeshShape(group.kind, 1, size) for size in range(1, group.devices_per_host + 1)]
            hosts = [SubmeshShape(group.kind, count, group.devices_per_host) for count in range(2, group.num_hosts + 1)]
            found |= dict.fromkeys([*inside, *hosts])
        return tuple(sorted(found, key=lambda shape: -shape.num_devices))

    def check_kinds(self, known: Collection[str], what: str) -> None:
        """Raise a `ClusterError` if a kind is not among `known`; `what` describes the known data in the message."""
        for kind in self.kinds:
            if kind not in known:
                names = ", ".join(sorted(known)) or "none"
                raise ClusterError(f"the cluster {self} has devices of kind {kind!r}, but there is {what} for: {names}")

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """The devices in one order of the groups, with the possible submeshes (places) by number.

    Positions count devices from the start of the line. Places are sorted by `start`, then the larger first.

    Args:
        submeshes: the places as submeshes of the cluster.
        shape: the number of each place's shape, int[places].
        start: the position of a place's first device, int[places].
        end: the position after its last device, int[places].
    """

    submeshes: tuple[Submesh, ...]
    shape: np.ndarray
    start: np.ndarray
    end: np.ndarray


def lines(cluster: Cluster, shapes: Sequence[SubmeshShape]) -> tuple[Line, ...]:
    """A line for each order of the groups, with the places of these shapes only."""
    return tuple(_line(cluster, order, shapes) for order in itertools.permutations(range(len(cluster.groups))))


def _line(cluster: Cluster, order: Sequence[int], shapes: Sequence[SubmeshShape]) -> Line:
    devices_before = np.cumsum([0, *(group.num_devices for group in cluster.groups)]).tolist()
    hosts_before = np.cumsum([0, *(group.num_hosts for group in cluster.groups)]).tolist()
    places: list[tuple[int, int, int, Submesh]] = []  # start, -size, shape, where
    position = 0
    for number in order:
        group = cluster.groups[number]
        for at in range(group.num_devices):
            host, inside = divmod(at, group.devices_per_host)
            for index, shape in enumerate(shapes):
                if _fits(shape, group, host, inside):
                    where = Submesh(shape, devices_before[number] + at, hosts_before[number] + host)
                    places.append((position + at, -shape.num_devices, index, where))
        position += group.num_devices
    places.sort(key=lambda place: place[:3])
    start = np.array([place[0] for place in places], int)
    return Line(
        submeshes=tuple(place[3] for place in places),
        shape=np.array([place[2] for place in places], int),
        start=start,
        end=start - np.array([place[1] for place in places], int),
    )


def _fits(shape: SubmeshShape, group: DeviceGroup, host: int, inside: int) -> bool:
    """Whether a submesh of this shape may start at a device of a host of a group."""
    if shape.kind != group.kind:
        return False
    if shape.num_hosts == 1:
        return inside + shape.devices_per_host <= group.devices_per_host
    whole = shape.devices_per_host == group.devices_per_host and inside == 0
    return whole and host + shape.num_hosts <= group.num_hosts
