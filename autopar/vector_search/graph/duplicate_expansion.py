"""A search of the distinct vectors, and what it finds of all: each with its copies.

In: the best of distinct vectors, and which vectors each stands for. Out: the best of all. A graph of all would end where
there are many copies of one: none of these has edges but to others, and they fill a beam of any size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autopar.vector_search.data.metrics import NO_ID, worst_score
from autopar.vector_search.kernels.top_k_merge import Best, LeftOut


class Copies(NamedTuple):
    """Which vectors are equal. order: int32 `[n]`: positions of all, equal ones side by side. starts: int32
    `[num_distinct + 1]`: where in `order` the copies of each distinct vector begin, and all end."""

    order: Any
    starts: Any

    @property
    def firsts(self) -> Any:
        """int32 `[num_distinct]`: the position of one of each."""
        return self.order[self.starts[:-1]]

    def left_out(self, left_out: LeftOut) -> LeftOut:
        """What a search of the distinct vectors is not to find, where one of all is not to find `left_out`."""
        return left_out._replace(groups=left_out.groups[self.firsts])

    def counted(self, allowed: jax.Array | None) -> Counted:
        """The copies that may be found.

        Args:
            allowed: bool `[n]`: which these are; None: all.
        """
        if allowed is None:
            return Counted(self.starts, None)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(allowed[self.order], dtype=jnp.int32)])
        return Counted(before[self.starts], before)

    def of(self, found: Best, k: int, counted: Counted) -> Best:
        """The best k of all, of the best distinct ones: `[num_queries, m]`, of which each may be found."""
        node = jnp.maximum(found.positions, 0)
        first = counted.before_each[node]
        num = jnp.where(found.positions == NO_ID, 0, jnp.minimum(counted.before_each[node + 1] - first, k))
        ends = jnp.cumsum(num, axis=1)
        place = jnp.arange(k, dtype=jnp.int32)
        which = jax.vmap(lambda end: jnp.searchsorted(end, place, side="right"))(ends).astype(jnp.int32)
        is_there = which < ends.shape[1]
        which = jnp.minimum(which, ends.shape[1] - 1)
        at = jnp.take_along_axis(first - (ends - num), which, axis=1) + place
        at = jnp.where(is_there, at, 0)
        if counted.before is not None:  # the place of the at-th that is allowed
            at = jnp.searchsorted(counted.before, at + 1).astype(jnp.int32) - 1
        best = jnp.take_along_axis(found.scores, which, axis=1)
        return Best(jnp.where(is_there, best, worst_score(best.dtype)), jnp.where(is_there, self.order[at], NO_ID))


class Counted(NamedTuple):
    """How many vectors that may be found come before. before_each: int32 `[num_distinct + 1]`: each distinct one's copies,
    in `Copies.order`. before: int32 `[n + 1]`: each of `order`; None where all may be."""

    before_each: jax.Array
    before: jax.Array | None

    @property
    def is_allowed(self) -> jax.Array | None:
        """bool `[num_distinct]`: whether any copy of each may be found; None where all may be."""
        return None if self.before is None else self.before_each[1:] > self.before_each[:-1]
