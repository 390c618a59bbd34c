"""Combine what workers pushed: add up in the order of the workers, and scale to the mean over their examples.

In: the terms of one update, by worker. Out: the values that the update reads. With all workers, sums are those of gradient
accumulation in the same order, to the bit: the scale is 1. Sums of fewer workers, or of several iterations, are scaled by the number of
workers over the number of shares: an update is always the step on the examples of those whose terms it has.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from autopar.errors import StoreError
from autopar.transforms.microbatch.slices import COMBINE
from autopar.transforms.microbatch.worker_programs import Term

#: The key of the number of shares in a push.
SHARES = "number of shares"


def combined(
    terms: Sequence[Term], keys: Sequence[str], num_workers: int, pushed: Sequence[Mapping[str, jax.Array]]
) -> list[jax.Array]:
    """The values of all terms; traced.

    Args:
        keys: of the terms, in their order.
        pushed: the terms of each worker in the update; a key that is missing everywhere is zero.
    """
    num_shares = functools.reduce(jax.lax.add, [one[SHARES] for one in pushed])
    return [
        _combined(term, [one[key] for one in pushed if key in one], num_shares, num_workers)
        for term, key in zip(terms, keys, strict=True)
    ]


def _combined(term: Term, values: Sequence[jax.Array], num_shares: jax.Array, num_workers: int) -> jax.Array:
    if term.kind == "rows":
        if len(values) != num_workers or term.cut is None:
            raise StoreError(
                f"the step returns a value for each example ({term.where}), and an update has those of {len(values)} of"
                f" {num_workers} workers"
            )
        return term.cut.merged(jnp.stack(values), term.shape)
    if term.kind == "same" and values:
        return values[-1]
    if term.kind != "sum":
        return functools.reduce(COMBINE[term.kind], values)
    if not values:
        return jnp.zeros(term.shape, term.dtype)
    dtype = jnp.dtype(term.dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return functools.reduce(jax.lax.add, values) * num_workers // num_shares.astype(dtype)
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    wide = jnp.dtype("float32") if is_narrow else dtype
    total = functools.reduce(jax.lax.add, [value.astype(wide) for value in values])
    scale = num_workers / num_shares.astype(jnp.finfo(wide).dtype)
    return (total * scale.astype(wide)).astype(dtype)
