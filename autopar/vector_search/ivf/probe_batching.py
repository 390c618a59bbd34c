"""Batch probes by list: work items that score one block against several queries that probe its list.

In: the lists that each query probes, and the blocks of each list. Out: the rank of each probe in its list, and
`WorkItems`: for each block of a list, one padded matmul per `rows` queries that probe the list. Padding is at most one
partial matmul per block, however unequal the lists and however skewed the probes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ProbesByList(NamedTuple):
    """Probes sorted by list.

    Args:
        rank: `[num_queries, num_probes]`, rank of each probe among the probes of its list.
        queries: `[num_queries * num_probes]`, query of each probe, in sorted order.
        first: `[num_lists + 1]`, offsets of the lists in sorted order.
    """

    rank: jax.Array
    queries: jax.Array
    first: jax.Array

    @property
    def counts(self) -> jax.Array:
        """`[num_lists]`: number of probes of each list."""
        return self.first[1:] - self.first[:-1]


def group_by_list(probes: jax.Array, num_lists: int) -> ProbesByList:
    """Sort `probes`, list numbers `[num_queries, num_probes]`, by list."""
    flat = probes.reshape(-1)
    order = jnp.argsort(flat).astype(jnp.int32)
    in_order = flat[order]
    first = jnp.searchsorted(in_order, jnp.arange(num_lists + 1, dtype=flat.dtype)).astype(jnp.int32)
    place = jnp.arange(flat.size, dtype=jnp.int32) - first[in_order]
    rank = jnp.zeros(flat.size, jnp.int32).at[order].set(place, unique_indices=True)
    return ProbesByList(rank.reshape(probes.shape), order // probes.shape[1], first)


class WorkItems(NamedTuple):
    """Matmuls of a block with some queries that probe its list, list by list. Entries beyond the last item are
    arbitrary.

    Args:
        first_item: `[num_lists + 1]`, offsets of the lists in work items.
        lists: `[most]`, list of each item.
        blocks: `[most]`, block of each item.
        first_probe: `[most]`, index of its first query in `ProbesByList.queries`.
    """

    first_item: jax.Array
    lists: jax.Array
    blocks: jax.Array
    first_probe: jax.Array

    @property
    def num_items(self) -> jax.Array:
        return self.first_item[-1]


def work_items(by_list: ProbesByList, first_block: jax.Array, rows: int, most: int) -> WorkItems:
    """Work items of at most `rows` queries.

    Args:
        first_block: `[num_lists + 1]`, offsets of the lists in blocks.
        most: upper bound of the number of items (`num_work_items`).
    """
    num_lists = by_list.first.shape[0] - 1
    num_blocks = first_block[1:] - first_block[:-1]
    needed = -(-by_list.counts // rows) * num_blocks
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(needed).astype(jnp.int32)])
    item = jnp.arange(most, dtype=jnp.int32)
    which = jnp.searchsorted(before, item, side="right").astype(jnp.int32) - 1
    which = jnp.minimum(which, num_lists - 1)
    place = item - before[which]
    block = first_block[which] + place % num_blocks[which]
    return WorkItems(before, which, block, by_list.first[which] + place // num_blocks[which] * rows)


def num_work_items(num_queries: int, rows: int, num_blocks: int, most_blocks: int) -> tuple[int, int]:
    """Upper bound of the number of work items for any probes, and the number with half-full last items.

    Args:
        num_blocks: blocks of all lists.
        most_blocks: maximum blocks that one query probes.
    """
    num_pairs = num_queries * most_blocks
    padding = (rows - 1) * min(num_blocks, num_pairs)  # the last item of a block may have a single query
    return max(1, (num_pairs + padding) // rows), max(1, (num_pairs + padding // 2) // rows)
