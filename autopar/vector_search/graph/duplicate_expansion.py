"""Expand results on distinct vectors to all vectors, each with its duplicates.

In: the best distinct vectors, and the groups of equal vectors. Out: the best of all vectors. The graph has one node per
distinct vector: the nodes of many equal vectors would have edges only to each other and would fill any beam.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autopar.vector_search.data.metrics import NO_ID, worst_score
from autopar.vector_search.kernels.top_k_merge import Best, LeftOut


class Copies(NamedTuple):
    """Groups of equal vectors.

    Args:
        order: int32 `[n]`, positions of all vectors, group by group.
        starts: int32 `[num_distinct + 1]`, offsets of the groups in `order`.
    """

    order: Any
    starts: Any

    @property
    def firsts(self) -> Any:
        """int32 `[num_distinct]`: the position of one vector of each group."""
        return self.order[self.starts[:-1]]

    def left_out(self, left_out: LeftOut) -> LeftOut:
        """The exclusions of a search of the distinct vectors."""
        return left_out._replace(groups=left_out.groups[self.firsts])

    def count_allowed(self, allowed: jax.Array | None) -> AllowedCounts:
        """Count the vectors that may be returned.

        Args:
            allowed: bool `[n]`, vectors that may be returned; None: all.
        """
        if allowed is None:
            return AllowedCounts(self.starts, None)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(allowed[self.order], dtype=jnp.int32)])
        return AllowedCounts(before[self.starts], before)

    def expand(self, found: Best, k: int, counts: AllowedCounts) -> Best:
        """Replace the distinct vectors of a result, `[num_queries, m]`, by their allowed duplicates; keep the best k."""
        node = jnp.maximum(found.positions, 0)
        first = counts.before_each[node]
        num = jnp.where(found.positions == NO_ID, 0, jnp.minimum(counts.before_each[node + 1] - first, k))
        ends = jnp.cumsum(num, axis=1)
        place = jnp.arange(k, dtype=jnp.int32)
        which = jax.vmap(lambda end: jnp.searchsorted(end, place, side="right"))(ends).astype(jnp.int32)
        is_valid = which < ends.shape[1]
        which = jnp.minimum(which, ends.shape[1] - 1)
        at = jnp.take_along_axis(first - (ends - num), which, axis=1) + place
        at = jnp.where(is_valid, at, 0)
        if counts.before is not None:  # the position in `order` of the at-th allowed vector
            at = jnp.searchsorted(counts.before, at + 1).astype(jnp.int32) - 1
        best = jnp.take_along_axis(found.scores, which, axis=1)
        return Best(jnp.where(is_valid, best, worst_score(best.dtype)), jnp.where(is_valid, self.order[at], NO_ID))


class AllowedCounts(NamedTuple):
    """Prefix counts of the vectors that may be returned.

    Args:
        before_each: int32 `[num_distinct + 1]`, before each group, in `Copies.order`.
        before: int32 `[n + 1]`, before each entry of `order`; None if all may be returned.
    """

    before_each: jax.Array
    before: jax.Array | None

    @property
    def is_allowed(self) -> jax.Array | None:
        """bool `[num_distinct]`: whether any vector of a group may be returned; None if all may."""
        return None if self.before is None else self.before_each[1:] > self.before_each[:-1]
