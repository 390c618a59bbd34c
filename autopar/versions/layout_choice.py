"""Choose the layout of a store: planned from the sizes of its arrays and its servers, or the user's, checked.

In: arrays by key, the server's update, the places of the shards, the rates of servers. Out: a `Layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from autopar.errors import StoreError
from autopar.versions.division import part_name
from autopar.versions.host_memory.memory_kinds import is_in_host_memory
from autopar.versions.keys import shown
from autopar.versions.layout.layout import Layout
from autopar.versions.layout.plan import ArraySize, plan_layout
from autopar.versions.layout.servers import Server
from autopar.versions.row_wise import is_elementwise
from autopar.versions.server_update import Weights

Place = jax.Device | jax.sharding.Sharding


def default_layout(
    arrays: Weights, update: Any, places: Sequence[Place], servers: Sequence[Server] | None, num_workers: int
) -> Layout:
    """The planner's layout. Arrays are divided only between single devices, by an update that treats their rows alike."""
    kinds = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in arrays.items()}
    sizes = {key: size_of(array.shape, array.dtype.itemsize) for key, array in arrays.items()}
    single = all(
        isinstance(place, jax.Device) or (len(place.device_set) == 1 and not is_in_host_memory(place))
        for place in places
    )
    names = sorted(arrays)
    confusing = {key for key in names if any(name.startswith(part_name(key)) for name in names)}
    whole = confusing if single and is_elementwise(update, kinds) else None
    return plan_layout(sizes, [Server()] * len(places) if servers is None else servers, num_workers, whole=whole)


def checked_layout(layout: Layout, arrays: Weights, num_places: int) -> Layout:
    """A user's layout, if it has all rows of these arrays once."""
    if layout.num_servers != num_places:
        raise StoreError(f"the layout has {layout.num_servers} servers, and there are {num_places} `shards`")
    if layout.pieces.keys() != arrays.keys():
        other = sorted(layout.pieces.keys() ^ arrays.keys())[:5]
        raise StoreError(
            f"the layout is of other arrays: {', '.join(map(shown, other))} is only there or only in `values`"
        )
    for key, array in arrays.items():
        end, rows = 0, size_of(array.shape, 1).num_rows
        for piece in layout.pieces[key]:
            if piece.first_row != end or not 0 <= piece.server < num_places:
                end = -1
                break
            end += piece.num_rows
        servers = {piece.server for piece in layout.pieces[key]}
        if end != rows or len(servers) != len(layout.pieces[key]) or not servers:
            raise StoreError(
                f"the layout does not have the {rows} rows of {shown(key)} once each, in order, on servers of their own"
            )
    return layout


def size_of(shape: tuple[int, ...], element_bytes: int) -> ArraySize:
    """Rows and bytes of an array."""
    return ArraySize(shape[0], element_bytes * math.prod(shape[1:])) if shape else ArraySize(1, element_bytes)
