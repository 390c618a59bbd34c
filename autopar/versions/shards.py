"""Divide the keys of a store into shards, each with a version of its own.

In: arrays by key, the places of the shards, and a layout or the rates of servers, from which one is planned. Out: `Shard`s, and
where each key is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import StoreError
from autopar.versions.division import Division, division_of
from autopar.versions.host_memory.memory_kinds import in_host_memory, is_in_host_memory, on_device
from autopar.versions.host_memory.update import UpdateInHostMemory
from autopar.versions.keys import shown
from autopar.versions.layout.layout import Layout, Piece
from autopar.versions.layout.servers import Server
from autopar.versions.layout_choice import Place, checked_layout, default_layout, size_of
from autopar.versions.server_update import Pushed, ServerUpdate, Weights, update_of
from autopar.versions.terms import TermsUpdate


@dataclass(frozen=True, slots=True)
class Shard:
    """One version of a shard.

    Args:
        weights: its arrays, or the rows of them that it has, by key.
        keys: by name of what may be pushed, a part (`division`) or a term, its key for `update`.
        state: of the server's update, such as an optimizer's.
        version: the number of updates applied to it.
    """

    weights: Weights
    keys: Mapping[str, str]
    update: ServerUpdate
    state: Any
    version: int = 0

    def place(self, key: str) -> Place:
        """Where an array is: `device_put` to a device takes half the time of that to its sharding."""
        array = self.weights[key]
        return array.sharding if len(array.devices()) > 1 or in_host_memory(array) else next(iter(array.devices()))

    def updated(self, updates: Sequence[Mapping[str, Pushed]]) -> Shard:
        """The next version, by updates of parts, also those of other shards; the same one if none is of this shard, or
        has nothing that the server acts on."""
        own = [{self.keys[name]: pushed for name, pushed in update.items() if name in self.keys} for update in updates]
        if not any(own):
            return self
        weights, state = self.update.apply(self.weights, self.state, own)
        if weights is self.weights:
            return self
        return replace(self, weights=weights, state=state, version=self.version + 1)


def shards_of(
    values: Mapping[str, Any],
    update: Any,
    places: Sequence[Place] | None = None,
    *,
    servers: Sequence[Server] | None = None,
    layout: Layout | None = None,
    num_workers: int = 1,
) -> tuple[tuple[Shard, ...], Division, tuple[int | None, ...]]:
    """The shards of a store, with copies of the values; where each key is; and the worker on the machine of each shard.

    Args:
        places: a device or a sharding for each shard; None for one shard that stays where its arrays are.
        servers: their links and rates, one for each shard, from which a layout is planned; None for equal ones.
        layout: which shard has which keys and rows, in place of a planned one.

    Raises:
        StoreError: no keys, a key that is no string, a value that is no array, or a layout that does not fit.
    """
    if not isinstance(values, Mapping) or not values:
        raise StoreError("a store needs arrays by key, as {'kernel': kernel}: flatten a pytree first")
    arrays: Weights = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise StoreError(f"the key {key!r} is no string: flatten a pytree of arrays to one dict first")
        try:
            arrays[key] = jnp.array(value, copy=True)  # so that nobody else can donate it
        except (TypeError, ValueError) as error:
            raise StoreError(f"the value of {key!r} is no array, but a {type(value).__name__}: {error}") from None
    arrays = dict(sorted(arrays.items()))
    kinds = {key: (array.shape, array.dtype) for key, array in arrays.items()}
    if places is None:
        if servers is not None or layout is not None:
            raise StoreError(
                "`servers` and `layout` are for several shards: give `shards` a device or sharding for each"
            )
        division = division_of(
            kinds, {key: (Piece(0, 0, size_of(shape, 1).num_rows),) for key, (shape, _) in kinds.items()}
        )
        return (_shard(arrays, {key: key for key in arrays}, update, None),), division, (None,)
    places = list(places)
    for place in places or [0]:
        if not isinstance(place, Place):
            has = f"has {shown(place)}" if places else "is empty"
            raise StoreError(f"`shards` {has}: give a device or sharding for each shard")
    if layout is not None and servers is not None:
        raise StoreError("`layout` says what each server has, and `servers` plans it: give one of them")
    if servers is not None and len(servers) != len(places):
        raise StoreError(f"`servers` has {len(servers)} servers for {len(places)} shards: give one for each")
    if layout is None:
        layout = default_layout(arrays, update, places, servers, num_workers)
    else:
        layout = checked_layout(layout, arrays, len(places))
    if isinstance(update, TermsUpdate) and len(places) != 1:
        raise StoreError(f"an update from terms makes all arrays, in one shard; {len(places)} shards were requested")
    division = division_of(kinds, layout.pieces)
    shards: list[Shard] = []
    for number, place in enumerate(places):
        own = {name: part for name, part in division.parts.items() if part.shard == number}
        part_arrays = {
            part.key: arrays[part.key]
            if part.key not in division.divided
            else arrays[part.key][part.first_row : part.first_row + part.num_rows]
            for part in own.values()
        }
        shards.append(_shard(part_arrays, {name: part.key for name, part in own.items()}, update, place))
    return tuple(shards), division, layout.workers


def _shard(arrays: Weights, keys: Mapping[str, str], update: Any, place: Place | None) -> Shard:
    if place is not None:
        try:
            arrays = {key: jax.device_put(array, place) for key, array in arrays.items()}
        except ValueError as error:
            raise StoreError(f"a shard of {', '.join(arrays)} cannot be placed on {place}: {error}") from None
    owners = {key: array.devices() for key, array in arrays.items()}
    first = next(iter(owners), "")
    for key, devices in owners.items():
        if devices != owners[first]:
            raise StoreError(
                f"{shown(first)} is on {_named(owners[first])} and {shown(key)} on {_named(devices)}, but a shard is on one"
                " device or submesh: give `shards` a device or sharding for each shard"
            )
    in_host = is_in_host_memory(place)
    made = update_of(update, {key: on_device(array) for key, array in arrays.items()} if in_host else arrays)
    if isinstance(made, TermsUpdate):
        keys = {key: key for key in made.takes}
    if in_host:
        made = UpdateInHostMemory(made)
    return Shard(arrays, keys, made, made.init(arrays))


def _named(devices: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, devices)))
