"""Devices in a line, and the submeshes that stages may stand on.

In: groups of hosts, each of one kind of device. Out: a `Cluster`; the shapes of its submeshes; and its `Line`s, one for
each order of the groups, with every place where a submesh may stand. A submesh is a run of devices inside one host, of
any size, or some whole hosts of one group: so it is never of two kinds, and never has a part of a host beside another
host. Stages stand on submeshes in the order of the line.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import ClusterError

_MOST_GROUPS = 4  # every order of them is tried


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Hosts that are alike, side by side.

    Args:
        kind: of device, as a hardware profile is called.
        num_hosts, devices_per_host: at least 1.
    """

    kind: str
    num_hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        """Of all its hosts."""
        return self.num_hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.num_hosts}x{self.devices_per_host} {self.kind}"


@dataclass(frozen=True, slots=True)
class SubmeshShape:
    """What the price of a stage depends on, wherever the submesh stands.

    Args:
        kind: of device.
        num_hosts: more than 1 only where the hosts are whole.
        devices_per_host: of the submesh.
        parts: into how many equal submeshes branches of a model split it (`branches.py`); 1: it is one mesh.
        option: which of several ways to run a stage there that differ in price, for whoever makes prices to tell
            apart: quick or frugal with memory, say.
    """

    kind: str
    num_hosts: int
    devices_per_host: int
    parts: int = 1
    option: int = 0

    @property
    def num_devices(self) -> int:
        """Of all its hosts."""
        return self.num_hosts * self.devices_per_host

    def __str__(self) -> str:
        size = f"{self.num_hosts}x{self.devices_per_host}" if self.num_hosts > 1 else f"{self.devices_per_host}"
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{size} {self.kind}{parts}" + (f", option {self.option}" if self.option else "")


@dataclass(frozen=True, slots=True)
class Submesh:
    """A shape at a place: devices `first_device`, … of the cluster, the first of them on host `first_host`."""

    shape: SubmeshShape
    first_device: int
    first_host: int

    @property
    def devices(self) -> range:
        """Their numbers, host after host in the order of the cluster's groups."""
        return range(self.first_device, self.first_device + self.shape.num_devices)

    def shares_host(self, other: Submesh) -> bool:
        """Whether both lie inside one and the same host."""
        alone = self.shape.num_hosts == other.shape.num_hosts == 1
        return alone and self.first_host == other.first_host


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices.

    Raises:
        ClusterError: no group, a number below 1, two groups of the same hosts, or too many groups.

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
                raise ClusterError(f"{group!r}: a group needs the kind of its devices, as a hardware profile is called")
            for name in ("num_hosts", "devices_per_host"):
                value = getattr(group, name)
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ClusterError(f"{group!r}: `{name}` must be a whole number of at least 1; got {value!r}")
        for one, other in itertools.combinations(self.groups, 2):
            if (one.kind, one.devices_per_host) == (other.kind, other.devices_per_host):
                raise ClusterError(
                    f"two groups of hosts with {one.devices_per_host} {one.kind}, {one} and {other}: make them one,"
                    f" DeviceGroup({one.kind!r}, {one.num_hosts + other.num_hosts}, {one.devices_per_host})"
                )
        if len(self.groups) > _MOST_GROUPS:
            raise ClusterError(f"{len(self.groups)} groups of hosts; at most {_MOST_GROUPS}, for every order is tried")

    @property
    def num_devices(self) -> int:
        """Of all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each kind of device once, in order."""
        return tuple(dict.fromkeys(group.kind for group in self.groups))

    def shapes(self) -> tuple[SubmeshShape, ...]:
        """Every shape that a submesh may have, in one part and one option, each once, the largest first."""
        found: dict[SubmeshShape, None] = {}
        for group in self.groups:
            inside = [SubmeshShape(group.kind, 1, size) for size in range(1, group.devices_per_host + 1)]
            hosts = [SubmeshShape(group.kind, count, group.devices_per_host) for count in range(2, group.num_hosts + 1)]
            found |= dict.fromkeys([*inside, *hosts])
        return tuple(sorted(found, key=lambda shape: -shape.num_devices))

    def check_kinds(self, known: Collection[str], what: str) -> None:
        """Raise a `ClusterError` where a kind is not among `known`; `what` is what is known of those."""
        for kind in self.kinds:
            if kind not in known:
                names = ", ".join(sorted(known)) or "none"
                raise ClusterError(f"the cluster {self} has devices of kind {kind!r}, but there is {what} for: {names}")

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """The devices in one order of the groups, with the places for submeshes, by number.

    Positions count devices from the line's begin; hosts are numbered along the line too. Places are sorted by `start`,
    the larger first.

    Args:
        submeshes: the places as submeshes of the cluster.
        shape: number of each place's shape, int[places].
        start, end: position before its first and after its last device, int[places].
        host: the host at whose first device it starts; -1 where it starts inside one. int[places]
        next_host: the first host that starts at `end` or later; `num_hosts` where there is none. int[places]
        num_hosts: of all groups.
        left, right: all pairs of places one of which begins inside a host where the other one ends, by `left`.
    """

    submeshes: tuple[Submesh, ...]
    shape: np.ndarray
    start: np.ndarray
    end: np.ndarray
    host: np.ndarray
    next_host: np.ndarray
    num_hosts: int
    left: np.ndarray
    right: np.ndarray


def lines(cluster: Cluster, shapes: Sequence[SubmeshShape]) -> tuple[Line, ...]:
    """A line for each order of the groups, with the places of these shapes alone."""
    return tuple(_line(cluster, order, shapes) for order in itertools.permutations(range(len(cluster.groups))))


def _line(cluster: Cluster, order: Sequence[int], shapes: Sequence[SubmeshShape]) -> Line:
    devices_before = np.cumsum([0, *(group.num_devices for group in cluster.groups)]).tolist()
    hosts_before = np.cumsum([0, *(group.num_hosts for group in cluster.groups)]).tolist()
    host_starts: list[int] = []
    places: list[tuple[int, int, int, Submesh]] = []  # start, -size, shape, where
    position = 0
    for number in order:
        group = cluster.groups[number]
        for at in range(group.num_devices):
            host, inside = divmod(at, group.devices_per_host)
            if inside == 0:
                host_starts.append(position + at)
            for index, shape in enumerate(shapes):
                if _fits(shape, group, host, inside):
                    where = Submesh(shape, devices_before[number] + at, hosts_before[number] + host)
                    places.append((position + at, -shape.num_devices, index, where))
        position += group.num_devices
    places.sort(key=lambda place: place[:3])
    start = np.array([place[0] for place in places], int)
    end = start - np.array([place[1] for place in places], int)
    begins = {at: host for host, at in enumerate(host_starts)}
    inside = {at for at in range(position) if at not in begins}
    starting: dict[int, list[int]] = {}
    for index, at in enumerate(start.tolist()):
        starting.setdefault(at, []).append(index)
    pairs = [(p, q) for p, at in enumerate(end.tolist()) if at in inside for q in starting.get(at, [])]
    return Line(
        submeshes=tuple(place[3] for place in places),
        shape=np.array([place[2] for place in places], int),
        start=start,
        end=end,
        host=np.array([begins.get(at, -1) for at in start.tolist()], int),
        next_host=np.searchsorted(host_starts, end),
        num_hosts=len(host_starts),
        left=np.array([p for p, _ in pairs], int),
        right=np.array([q for _, q in pairs], int),
    )


def _fits(shape: SubmeshShape, group: DeviceGroup, host: int, inside: int) -> bool:
    """Whether a submesh of this shape may start at a device of a host of a group."""
    if shape.kind != group.kind:
        return False
    if shape.num_hosts == 1:
        return inside + shape.devices_per_host <= group.devices_per_host
    whole = shape.devices_per_host == group.devices_per_host and inside == 0
    return whole and host + shape.num_hosts <= group.num_hosts
