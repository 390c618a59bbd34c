"""Which query asks which list, seen from the lists: the rows of padded matrices that they are multiplied in.

In: the lists that each query probes. Out: each probe's seat among those of its list; from seats the row of each probe
in a pass over some of the lists, in which each list has a fixed number of rows. What finds no row in one pass does in
a later one: nothing is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Seats(NamedTuple):
    """`seat`, `[num_queries, num_probes]`: how many probes of the same list come before this one; `taken`,
    `[num_lists]`: how many probes a list has."""

    seat: jax.Array
    taken: jax.Array


def seats(probes: jax.Array, num_lists: int) -> Seats:
    """Of `probes`, `[num_queries, num_probes]`: lists by number."""
    flat = probes.reshape(-1)
    order = jnp.argsort(flat)
    in_order = flat[order]
    first = jnp.searchsorted(in_order, jnp.arange(num_lists + 1, dtype=flat.dtype)).astype(jnp.int32)
    place = jnp.arange(flat.size, dtype=jnp.int32) - first[in_order]
    seat = jnp.zeros(flat.size, jnp.int32).at[order].set(place, unique_indices=True)
    return Seats(seat.reshape(probes.shape), first[1:] - first[:-1])


class Tiles(NamedTuple):
    """What the lists of one class need beyond their first rows, cut into tiles of equal height.

    `before`, `[num_lists + 1]`: how many tiles the lists before this one have, and all have.
    """

    before: jax.Array

    @property
    def num_tiles(self) -> jax.Array:
        return self.before[-1]

    def lists(self, first: jax.Array, num: int) -> jax.Array:
        """`[num]`: the list of each tile from the `first` on; beyond the last tile any."""
        tile = first + jnp.arange(num, dtype=jnp.int32)
        found = jnp.searchsorted(self.before, tile, side="right").astype(jnp.int32) - 1
        return jnp.minimum(found, self.before.shape[0] - 2)


def tiles(taken: jax.Array, served: int, height: int) -> Tiles:
    """Of lists with `taken` seats each, of which the first `served` have been served."""
    needed = -(-jnp.maximum(taken - served, 0) // height)
    return Tiles(jnp.concatenate([jnp.zeros(1, needed.dtype), jnp.cumsum(needed)]).astype(jnp.int32))
