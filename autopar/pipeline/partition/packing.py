"""Say which submeshes fit into a cluster together, in any order, and give them devices.

In: a `Cluster` and the footprints of submeshes.
Out: a `Packing`, the graph that `dynamic_program.py` searches: its states say which devices are free after some stages,
and which the last stage left on its host; its moves place the next stage on that host or elsewhere. `placed` gives
devices to a sequence of submeshes.

Hosts of a group are identical, and so are devices of a host. Submeshes therefore fit together if and only if each can
be assigned to a group such that the hosts of submeshes of several hosts, and the hosts into which the other submeshes
can be packed, are no more than the group has. If hosts and devices are numbered by first use, every submesh is a run
of devices. Which state a move leads to is a `Rule`:

    Counted   free devices of each group, and hosts without a submesh of over half their devices
    Hosted    free devices of each group, and those of the last stage's host
    Exact     the free devices of every host, and which of them is the last stage's
    InLine    the stages in the order of the devices

`Exact` allows what is possible. `Counted` and `Hosted` allow more, so their optimum is a lower bound; `InLine` allows
less. Whatever `Counted` allows has a place if the sizes nest (`are_nested`): each size of a submesh inside a host
divides the next larger one, and each of at most half a host divides the host. Proof: give the hosts of a group to the
submeshes of several hosts, then to those of over half a host, one each; that is what `Counted` counts. Place the others
in the order of their size, the larger first. All submeshes before and the host are multiples of the next size s, and so
are the free devices of each host. A submesh of s devices therefore lacks a place only if no device is free. Powers of
two nest in hosts of 8, and 1, 2 and 4 in hosts of 6. Where sizes do not nest, packing is a further constraint: 5
submeshes of 3 devices do not fit 2 hosts of 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape

_ROUNDING = 1e-12  # relative
#: States that `placed` keeps for each stage, the cheapest; more than any exact packing that is searched.
_MOST_KEPT = 4096
#: A host: the number of its group, and its free devices.
_Host = tuple[int, int]
#: Free devices, and hosts.
_Count = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The devices of a submesh."""

    kind: str
    num_hosts: int
    devices_per_host: int

    @classmethod
    def of(cls, shape: SubmeshShape) -> Footprint:
        """The footprint of a shape, without its parts and option."""
        return cls(shape.kind, shape.num_hosts, shape.devices_per_host)

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def fits(self, group: DeviceGroup) -> bool:
        """Whether an empty group has room for it."""
        if self.kind != group.kind or self.num_hosts > group.num_hosts:
            return False
        return self.devices_per_host == group.devices_per_host or (
            self.num_hosts == 1 and self.devices_per_host < group.devices_per_host
        )


class Rule(Protocol):
    """The states of a packing."""

    def start(self) -> Any:
        """The state of an empty cluster; hashable."""
        ...

    def moves(self, state: Any, footprint: Footprint) -> Iterator[tuple[bool, Any]]:
        """The states after a submesh, each with whether it shares the last one's host."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """States by number, and the moves between them. `num_states` stands for no state.

    Args:
        inside: the states after a submesh on the last one's host; int[states, footprints, choices].
        across: the states after a submesh elsewhere; int[states, footprints, choices].
        num_later: the most submeshes that a state has room for; int[states].
        is_full: whether all devices are in use; bool[states].
    """

    inside: np.ndarray
    across: np.ndarray
    num_later: np.ndarray
    is_full: np.ndarray

    @property
    def num_states(self) -> int:
        """The number of states; state 0 is the empty cluster."""
        return len(self.inside)


def are_nested(cluster: Cluster, footprints: Sequence[Footprint]) -> bool:
    """Whether all submeshes that `Counted` allows fit together; the module's text has the proof."""
    for group in cluster.groups:
        size, inside = group.devices_per_host, [f for f in footprints if f.num_hosts == 1 and f.fits(group)]
        sizes = sorted({footprint.devices_per_host for footprint in inside} - {size})
        if any(later % one for one, later in pairwise(sizes)) or any(size % one for one in sizes if 2 * one <= size):
            return False
    return True


def packing_of(cluster: Cluster, footprints: Sequence[Footprint], rule: Rule, most: float) -> Packing | None:
    """The packing by a rule; None if it has more than `most` states."""
    numbers: dict[Any, int] = {rule.start(): 0}
    free = [cluster.num_devices]
    moves: tuple[list[list[list[int]]], ...] = ([], [])  # inside, across: by state and footprint
    queue = [rule.start()]
    for number, state in enumerate(queue):
        for found in moves:
            found.append([[] for _ in footprints])
        for at, footprint in enumerate(footprints):
            for together, then in rule.moves(state, footprint):
                if then not in numbers:
                    numbers[then] = len(queue)
                    queue.append(then)
                    free.append(free[number] - footprint.num_devices)
                    if len(queue) > most:
                        return None
                moves[0 if together else 1][number][at].append(numbers[then])
    inside, across = (_table(found, none=len(queue)) for found in moves)
    num_free, least = np.array(free, int), min(footprint.num_devices for footprint in footprints)
    return Packing(inside, across, num_free // least, num_free == 0)


def _table(moves: Sequence[Sequence[Sequence[int]]], none: int) -> np.ndarray:
    """Lists of states as one array, filled with `none`."""
    choices = max((len(states) for row in moves for states in row), default=0) or 1
    return np.array([[[*states, *[none] * (choices - len(states))] for states in row] for row in moves], int)


@dataclass(frozen=True, slots=True)
class Counted:
    """A `Rule`: the state is the number of free devices of each group, and how many more submeshes of over half a host
    it has room for: a host has one of them at most.

    Args:
        footprints: the footprints of all submeshes.
    """

    cluster: Cluster
    footprints: tuple[Footprint, ...]

    def start(self) -> tuple[_Count, ...]:
        """See `Rule`."""
        every = enumerate(self.cluster.groups)
        return tuple(self._count(number, group.num_devices, group.num_hosts) for number, group in every)

    def moves(self, state: tuple[_Count, ...], footprint: Footprint) -> Iterator[tuple[bool, tuple[_Count, ...]]]:
        """See `Rule`. `Transfers` knows which shapes fit a host together."""
        for number, group in enumerate(self.cluster.groups):
            is_large = 2 * footprint.devices_per_host > group.devices_per_host
            free = state[number][0] - footprint.num_devices
            hosts = state[number][1] - footprint.num_hosts * is_large
            if footprint.fits(group) and free >= 0 and hosts >= 0:
                then = _with(state, number, self._count(number, free, hosts))
                yield False, then
                yield True, then

    def _count(self, number: int, free: int, hosts: int) -> _Count:
        """The state of a group; equal wherever the free devices say enough."""
        group = self.cluster.groups[number]
        large = [f.devices_per_host for f in self.footprints if f.fits(group)]
        least = min((size for size in large if 2 * size > group.devices_per_host), default=group.devices_per_host)
        return free, min(hosts, free // least)


@dataclass(frozen=True, slots=True)
class Hosted:
    """A `Rule`: the state is the number of free devices of each group, and at most how many of them are on the host of
    the last stage."""

    cluster: Cluster

    def start(self) -> tuple[tuple[int, ...], _Host | None]:
        """See `Rule`."""
        return tuple(group.num_devices for group in self.cluster.groups), None

    def moves(
        self, state: tuple[tuple[int, ...], _Host | None], footprint: Footprint
    ) -> Iterator[tuple[bool, tuple[tuple[int, ...], _Host | None]]]:
        """See `Rule`."""
        free, last = state
        size = footprint.num_devices
        if last is not None and _shares(self.cluster, last, footprint):
            yield True, (_with(free, last[0], free[last[0]] - size), _host(last[0], last[1] - size))
        for number, group in enumerate(self.cluster.groups):
            left = free[number] - size
            if footprint.fits(group) and left >= 0:
                room = min(group.devices_per_host - footprint.devices_per_host, left)
                yield False, (_with(free, number, left), _host(number, room))


@dataclass(frozen=True, slots=True)
class Exact:
    """A `Rule`: the state is the free hosts and the free devices of each other host but the last stage's, for each
    group; and the last stage's host."""

    cluster: Cluster

    def start(self) -> _Hosts:
        """See `Rule`."""
        return _Hosts(tuple((group.num_hosts, ()) for group in self.cluster.groups), None)

    def moves(self, state: _Hosts, footprint: Footprint) -> Iterator[tuple[bool, _Hosts]]:
        """See `Rule`."""
        for choice, then in self.choices(state, footprint):
            yield choice is None, then

    def choices(self, state: _Hosts, footprint: Footprint) -> Iterator[tuple[_Host | None, _Hosts]]:
        """The moves, each with its choice: None for the last host; or a group, and the free devices of a host there, 0
        for hosts without stages."""
        size, last = footprint.devices_per_host, state.last
        if last is not None and _shares(self.cluster, last, footprint):
            yield None, _Hosts(state.groups, _host(last[0], last[1] - size))
        closed = _closed(state)
        for number, group in enumerate(self.cluster.groups):
            if not footprint.fits(group):
                continue
            hosts, parts = closed[number]
            if hosts >= footprint.num_hosts:
                left = _with(closed, number, (hosts - footprint.num_hosts, parts))
                yield (number, 0), _Hosts(left, _host(number, group.devices_per_host - size))
            for part in sorted(set(state.groups[number][1])):  # without the last host, which would be inside
                if part >= size and footprint.num_hosts == 1:
                    at = parts.index(part)
                    left = _with(closed, number, (hosts, (*parts[:at], *parts[at + 1 :])))
                    yield (number, part), _Hosts(left, _host(number, part - size))


@dataclass(frozen=True, slots=True)
class _Hosts:
    """A state of `Exact`: for each group the number of hosts without stages and the free devices of each other host,
    sorted; and the last stage's host if devices are free there."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    last: _Host | None


@dataclass(frozen=True, slots=True)
class InLine:
    """A `Rule`: stages take hosts and devices in their order, and groups in any order. The state is the groups that are
    not begun, the last stage's group, the hosts after its last, and that host's free devices."""

    cluster: Cluster

    def start(self) -> tuple[frozenset[int], int, int, int]:
        """See `Rule`."""
        return frozenset(range(len(self.cluster.groups))), -1, 0, 0

    def moves(
        self, state: tuple[frozenset[int], int, int, int], footprint: Footprint
    ) -> Iterator[tuple[bool, tuple[frozenset[int], int, int, int]]]:
        """See `Rule`."""
        later, current, hosts, free = state
        if current >= 0 and free and _shares(self.cluster, (current, free), footprint):
            yield True, (later, current, hosts, free - footprint.num_devices)
        for number in ([current] if current >= 0 else []) + sorted(later):
            group = self.cluster.groups[number]
            left = (hosts if number == current else group.num_hosts) - footprint.num_hosts
            if footprint.fits(group) and left >= 0:
                yield False, (later - {number}, number, left, group.devices_per_host - footprint.devices_per_host)


@dataclass(order=True, slots=True)
class _Way:
    """How stages reach a state. Costs that differ by rounding are equal in `rank`.

    Args:
        returns: how often a stage returns to an earlier host.
    """

    rank: float
    returns: int
    cost: float = field(compare=False, default=0.0)
    choice: _Host | None = field(compare=False, default=None)
    before: _Way | None = field(compare=False, default=None)


def placed(
    cluster: Cluster,
    footprints: Sequence[Footprint],
    hops: Sequence[tuple[float, float]],
    combine: Callable[[float, float], float],
) -> tuple[float, list[tuple[int, int]]] | None:
    """Place submeshes where transfers between consecutive ones cost least; stay in the order of the devices where that
    costs no more.

    Args:
        hops: the cost of the transfer to the next submesh, on the same host and on another; `inf` if forbidden.
        combine: combines the costs of transfers.

    Returns:
        The cost of all transfers, and the first device and host of each submesh; None if there is no place.
    """
    rule = Exact(cluster)
    ways: dict[_Hosts, _Way] = {rule.start(): _Way(0.0, 0)}
    finest = _ROUNDING * sum(cost for hop in hops for cost in hop if math.isfinite(cost)) or 1.0
    for number, footprint in enumerate(footprints):
        inside, across = hops[number - 1] if number else (math.inf, 0.0)
        found: dict[_Hosts, _Way] = {}
        for state, way in ways.items():
            for choice, then in rule.choices(state, footprint):
                cost = combine(way.cost, inside if choice is None else across)
                if math.isinf(cost):
                    continue
                returns = way.returns + (choice is not None and choice[1] > 0)
                new = _Way(round(cost / finest), returns, cost, choice, way)
                if then not in found or new < found[then]:
                    found[then] = new
        ways = found
        if len(ways) > _MOST_KEPT:
            ways = dict(sorted(ways.items(), key=lambda item: item[1])[:_MOST_KEPT])
    if not ways:
        return None
    way: _Way | None = min(ways.values())
    cost, choices = way.cost, list[_Host | None]()
    while way is not None and way.before is not None:
        choices.append(way.choice)
        way = way.before
    return cost, _places(cluster, footprints, choices[::-1])


def _places(
    cluster: Cluster, footprints: Sequence[Footprint], choices: Sequence[_Host | None]
) -> list[tuple[int, int]]:
    """The first device and host of each submesh; hosts are numbered by first use."""
    first_device = np.cumsum([0, *(group.num_devices for group in cluster.groups)]).tolist()
    first_host = np.cumsum([0, *(group.num_hosts for group in cluster.groups)]).tolist()
    free: list[list[int]] = [[] for _ in cluster.groups]  # devices of each host in use
    found: list[tuple[int, int]] = []
    number, host = 0, -1
    for footprint, choice in zip(footprints, choices, strict=True):
        if choice is not None:
            last, (number, part) = (number, host), choice
            per_host = cluster.groups[number].devices_per_host
            if part == 0:
                host = len(free[number])
                free[number] += [per_host] * footprint.num_hosts
            else:
                host = next(h for h, left in enumerate(free[number]) if left == part and (number, h) != last)
        per_host = cluster.groups[number].devices_per_host
        taken = per_host - free[number][host]
        found.append((first_device[number] + host * per_host + taken, first_host[number] + host))
        for one in range(host, host + footprint.num_hosts):
            free[number][one] -= footprint.devices_per_host
    return found


def _closed(state: _Hosts) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The groups, with the last stage's host among the others."""
    if state.last is None:
        return state.groups
    hosts, parts = state.groups[state.last[0]]
    return _with(state.groups, state.last[0], (hosts, tuple(sorted((*parts, state.last[1])))))


def _shares(cluster: Cluster, host: _Host, footprint: Footprint) -> bool:
    """Whether a submesh fits beside others on a host."""
    same_kind = cluster.groups[host[0]].kind == footprint.kind
    return same_kind and footprint.num_hosts == 1 and footprint.devices_per_host <= host[1]


def _host(number: int, free: int) -> _Host | None:
    """A host, as long as it has free devices."""
    return (number, free) if free else None


def _with(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    """The tuple with another item."""
    return (*items[:number], item, *items[number + 1 :])
