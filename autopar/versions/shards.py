"""Divide the keys of a store into shards, each with a version of its own.

In: arrays by key, and the places of the shards. Out: `Shard`s: neighbouring keys, in the order of strings, of about equal
bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import StoreError
from autopar.versions.keys import shown
from autopar.versions.server_update import Pushed, ServerUpdate, Weights, update_of
from autopar.versions.terms import TermsUpdate

Place = jax.Device | jax.sharding.Sharding


@dataclass(frozen=True, slots=True)
class Shard:
    """One version of a shard.

    Args:
        weights: its arrays by key.
        state: of the server's update, such as an optimizer's.
        version: the number of updates applied to it.
    """

    weights: Weights
    update: ServerUpdate
    state: Any
    version: int = 0

    @property
    def taken(self) -> Collection[str]:
        """The keys of what may be pushed to it."""
        return self.update.takes if isinstance(self.update, TermsUpdate) else self.weights

    def updated(self, updates: Sequence[Mapping[str, Pushed]]) -> Shard:
        """The next version; the same one if no update has a key of the shard, or nothing that the server acts on."""
        if not any(updates):
            return self
        weights, state = self.update.apply(self.weights, self.state, updates)
        if weights is self.weights:
            return self
        return replace(self, weights=weights, state=state, version=self.version + 1)


def shards_of(values: Mapping[str, Any], update: Any, places: Sequence[Place] | None) -> tuple[Shard, ...]:
    """The shards of a store, with copies of the values.

    Args:
        places: a device or a sharding for each shard; None for one shard that stays where its arrays are.

    Raises:
        StoreError: no keys, a key that is no string, a value that is no array, or more places than keys.
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
    if places is None:
        return (_shard(arrays, update, None),)
    places = list(places)
    if not 0 < len(places) <= len(arrays):
        raise StoreError(f"{len(places)} shards were requested for {len(arrays)} keys: a shard has at least one key")
    ranges = key_ranges({key: array.nbytes for key, array in arrays.items()}, len(places))
    return tuple(
        _shard({key: arrays[key] for key in keys}, update, place) for keys, place in zip(ranges, places, strict=True)
    )


def key_ranges(num_bytes: Mapping[str, int], num_shards: int) -> list[list[str]]:
    """Cut keys, in their order, into so many ranges that the largest one is as small as possible.

    >>> key_ranges({"a": 4, "b": 1, "c": 1, "d": 1}, 2)
    [['a'], ['b', 'c', 'd']]
    """
    low, high = max(num_bytes.values(), default=0), sum(num_bytes.values())
    while low < high:
        middle = (low + high) // 2
        if len(_filled(num_bytes, middle, num_shards)) <= num_shards:
            high = middle
        else:
            low = middle + 1
    return _filled(num_bytes, low, num_shards)


def _filled(num_bytes: Mapping[str, int], limit: int, num_shards: int) -> list[list[str]]:
    """Ranges of at most `limit` bytes, each as long as possible while a key is left for every later shard."""
    ranges: list[list[str]] = [[]]
    room = limit
    for number, (key, size) in enumerate(num_bytes.items()):
        keys_left, shards_left = len(num_bytes) - number, num_shards - len(ranges)
        if ranges[-1] and (size > room or keys_left <= shards_left):
            ranges.append([])
            room = limit
        ranges[-1].append(key)
        room -= size
    return ranges


def _shard(arrays: Weights, update: Any, place: Place | None) -> Shard:
    if place is not None:
        try:
            arrays = {key: jax.device_put(array, place) for key, array in arrays.items()}
        except ValueError as error:
            raise StoreError(f"a shard of {', '.join(arrays)} cannot be placed on {place}: {error}") from None
    owners = {key: array.devices() for key, array in arrays.items()}
    first = next(iter(owners))
    for key, devices in owners.items():
        if devices != owners[first]:
            raise StoreError(
                f"{shown(first)} is on {_named(owners[first])} and {shown(key)} on {_named(devices)}, but a shard is on one"
                " device or submesh: give `shards` a device or sharding for each shard"
            )
    made = update_of(update, arrays)
    return Shard(arrays, made, made.init(arrays))


def _named(devices: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, devices)))
