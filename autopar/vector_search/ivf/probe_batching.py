"""Which query asks which list, seen from the lists: the padded products of matrices that serve all of them.

In: the lists that each query probes, and how many blocks each list has. Out: each probe's seat among those of its list;
and from seats `Units`: of each block of a list one product with every so many of the queries that ask that list. What
units multiply in vain is the last of these in each list, however unequal lists are, and however queries crowd on some.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Seats(NamedTuple):
    """Probes in the order of their lists.

    seat: `[num_queries, num_probes]`: how many probes of the same list come before this one.
    asks: `[num_queries * num_probes]`: the query of each probe, in that order.
    first: `[num_lists + 1]`: how many probes the lists before this one have, and all have.
    """

    seat: jax.Array
    asks: jax.Array
    first: jax.Array

    @property
    def taken(self) -> jax.Array:
        """`[num_lists]`: how many probes a list has."""
        return self.first[1:] - self.first[:-1]


def seats(probes: jax.Array, num_lists: int) -> Seats:
    """Of `probes`, `[num_queries, num_probes]`: lists by number."""
    flat = probes.reshape(-1)
    order = jnp.argsort(flat).astype(jnp.int32)
    in_order = flat[order]
    first = jnp.searchsorted(in_order, jnp.arange(num_lists + 1, dtype=flat.dtype)).astype(jnp.int32)
    place = jnp.arange(flat.size, dtype=jnp.int32) - first[in_order]
    seat = jnp.zeros(flat.size, jnp.int32).at[order].set(place, unique_indices=True)
    return Seats(seat.reshape(probes.shape), order // probes.shape[1], first)


class Units(NamedTuple):
    """Products of a block of a list with some of the queries that ask it, list by list.

    before: `[num_lists + 1]`: how many units the lists before this one have, and all have.
    which: `[most]`: of which list each is. block: of which block. asks: the first of its queries, in `Seats.asks`.
    Beyond the last unit any.
    """

    before: jax.Array
    which: jax.Array
    block: jax.Array
    asks: jax.Array

    @property
    def num_units(self) -> jax.Array:
        return self.before[-1]


def units(seating: Seats, first_block: jax.Array, rows: int, most: int) -> Units:
    """With `rows` queries in each, at most.

    Args:
        first_block: `[num_lists + 1]`: how many blocks the lists before this one have, and all have.
        most: no fewer than there are (`num_units`).
    """
    num_lists = seating.first.shape[0] - 1
    num_blocks = first_block[1:] - first_block[:-1]
    needed = -(-seating.taken // rows) * num_blocks
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(needed).astype(jnp.int32)])
    unit = jnp.arange(most, dtype=jnp.int32)
    which = jnp.searchsorted(before, unit, side="right").astype(jnp.int32) - 1
    which = jnp.minimum(which, num_lists - 1)
    place = unit - before[which]
    block = first_block[which] + place % num_blocks[which]
    return Units(before, which, block, seating.first[which] + place // num_blocks[which] * rows)


def num_units(num_queries: int, rows: int, num_blocks: int, most_blocks: int) -> tuple[int, int]:
    """How many units there are at most, whatever queries probe; and how many where the last of each list is half full.

    Args:
        num_blocks: of all lists. most_blocks: of the lists that one query probes.
    """
    asked = num_queries * most_blocks
    padding = (rows - 1) * min(num_blocks, asked)  # at most one row is there in the last unit of each
    return max(1, (asked + padding) // rows), max(1, (asked + padding // 2) // rows)
