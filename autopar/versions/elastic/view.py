"""Decide which server leads which chain, and which worker computes which share: a function of who is alive.

In: members that come and go. Out: `View`s with rising epochs. No sockets, no clock: a test plays any order of failures.

A server's keys are on a *chain* of replicas (van Renesse and Schneider 2004). The first one, the head, answers workers; each sends what it applies to the
next one before it answers. If the head dies, the next one has all that was acknowledged. A *share* is a fixed part of every batch. Shares belong
to workers, and move when workers come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """Who does what.

    Args:
        epoch: of two views the higher one is the newer.
        chains: for each server, the names of its replicas, the head first.
        waiting: for each server, replicas that are to be added, in the order in which they came.
        lost: for each server, whether all replicas died.
        workers: all, also those without shares.
        shares: the worker of each share; "" without one.
        addresses: of replicas, by name.
        over: whether all shares have done what was to be done.
    """

    epoch: int
    chains: tuple[tuple[str, ...], ...]
    waiting: tuple[tuple[str, ...], ...]
    lost: tuple[bool, ...]
    workers: tuple[str, ...]
    shares: tuple[str, ...]
    addresses: Mapping[str, str] = field(default_factory=dict)
    over: bool = False

    @classmethod
    def of(cls, servers: int, shares: int) -> View:
        """Without members."""
        none: tuple[tuple[str, ...], ...] = ((),) * servers
        return cls(0, none, none, (False,) * servers, (), ("",) * shares)

    def shares_of(self, worker: str) -> tuple[int, ...]:
        """The shares of a worker."""
        return tuple(share for share, owner in enumerate(self.shares) if owner == worker)

    def head(self, server: int) -> str:
        """The replica that answers; "" if there is none."""
        return self.chains[server][0] if self.chains[server] else ""

    def next_of(self, server: int, name: str) -> str:
        """The replica after another in a chain; "" after the last."""
        chain = self.chains[server]
        position = chain.index(name) + 1 if name in chain else len(chain)
        return chain[position] if position < len(chain) else ""

    def before(self, server: int, name: str) -> str:
        """The replica before another in a chain; "" before the head."""
        chain = self.chains[server]
        return chain[chain.index(name) - 1] if name in chain[1:] else ""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        return cls(
            epoch=int(data["epoch"]),
            chains=tuple(tuple(map(str, one)) for one in data["chains"]),
            waiting=tuple(tuple(map(str, one)) for one in data["waiting"]),
            lost=tuple(map(bool, data["lost"])),
            workers=tuple(map(str, data["workers"])),
            shares=tuple(map(str, data["shares"])),
            addresses={str(name): str(address) for name, address in data["addresses"].items()},
            over=bool(data["over"]),
        )


def with_replica(view: View, server: int, name: str, address: str, has_state: bool) -> View:
    """After a replica has come. The first one of a server is its chain; after the death of all, only one with the state.

    Args:
        has_state: whether it was restored, or has served before.
    """
    addresses = {**view.addresses, name: address}
    if name in view.chains[server] or name in view.waiting[server]:
        return replace(view, addresses=addresses)
    if not view.chains[server] and (has_state or not view.lost[server]):
        chains = _with(view.chains, server, (name,))
        lost = tuple(one and n != server for n, one in enumerate(view.lost))
        return _next(view, chains=chains, lost=lost, addresses=addresses)
    waiting = _with(view.waiting, server, (*view.waiting[server], name))
    return _next(view, waiting=waiting, addresses=addresses)


def with_copy(view: View, server: int, name: str) -> View:
    """After a waiting replica has got the state from the last one of the chain."""
    if name not in view.waiting[server]:
        return view
    waiting = _with(view.waiting, server, tuple(one for one in view.waiting[server] if one != name))
    return _next(view, chains=_with(view.chains, server, (*view.chains[server], name)), waiting=waiting)


def with_worker(view: View, name: str) -> View:
    """After a worker has come: it gets shares of those that have most."""
    return view if name in view.workers else _dealt(_next(view, workers=(*view.workers, name)))


def without(view: View, name: str) -> View:
    """After a member has gone: its shares are dealt again, the next replica leads."""
    chains = tuple(tuple(one for one in chain if one != name) for chain in view.chains)
    lost = tuple(
        gone or (bool(before) and not after) for gone, before, after in zip(view.lost, view.chains, chains, strict=True)
    )
    after = replace(
        view,
        chains=chains,
        waiting=tuple(tuple(one for one in waiting if one != name) for waiting in view.waiting),
        lost=lost,
        addresses={key: address for key, address in view.addresses.items() if key != name},
        workers=tuple(worker for worker in view.workers if worker != name),
        shares=tuple("" if worker == name else worker for worker in view.shares),
    )
    return _dealt(_next(after))


def ended(view: View) -> View:
    """After all shares have done what was to be done."""
    return view if view.over else _next(view, over=True)


def _dealt(view: View) -> View:
    """Deal shares so that their numbers differ by one at most, and as few as possible move."""
    shares = list(view.shares)
    own = {worker: [n for n, owner in enumerate(shares) if owner == worker] for worker in view.workers}
    free = [n for n, owner in enumerate(shares) if owner not in own]
    while own:
        least = min(own, key=lambda worker: len(own[worker]))
        most = max(own, key=lambda worker: len(own[worker]))
        if free:
            share = free.pop(0)
        elif len(own[most]) > len(own[least]) + 1:
            share = own[most].pop()
        else:
            break
        own[least].append(share)
        shares[share] = least
    return replace(view, shares=tuple(shares))


def _next(view: View, **fields: Any) -> View:
    return replace(view, epoch=view.epoch + 1, **fields)


def _with(values: tuple[tuple[str, ...], ...], index: int, value: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return (*values[:index], value, *values[index + 1 :])
