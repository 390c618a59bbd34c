"""IVF: vectors in lists around centroids, of which a query is compared with the nearest lists alone.

In: vectors, centroids, and the list of each vector. Out: `InvertedLists`, a pytree of arrays: each list is a run of blocks
of equal size, of which the last is filled up with padding. Blocks hold the vectors (`fill`, IVF-Flat), or their codes
(`fill_codes`, IVF-PQ). `list_search` searches both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from autopar.vector_search.data.metrics import NO_ID, Metric, terms
from autopar.vector_search.ivf.product_quantization import Codebooks, encode

#: Vectors.
_ENCODED_AT_ONCE = 65536

#: Slots of a block, at least: powers of two, as all of these.
_LEAST_SLOTS = 16

#: At most so many, and at most such a share of what a list has on average, so that padding is less than a third as a rule.
_SLOTS, _SHARE = 128, 0.6

#: Long lists have larger blocks, of which each of the devices that share one has enough.
_MOST_SLOTS, _SHARE_OF_LONG = 1024, 1 / 8


@partial(
    register_dataclass,
    data_fields=["centroids", "first_block", "vectors", "terms", "positions", "codebooks"],
    meta_fields=["longest", "metric", "copies"],
)
@dataclass(frozen=True, slots=True)
class InvertedLists:
    """Lists, each a run of blocks.

    Args:
        centroids: f32 `[num_lists, d]`.
        first_block: int32 `[num_lists + 1]`: where each list's blocks begin, and all end. Each list has at least one.
        vectors: `[num_blocks, slots, d]`, or codes of what vectors differ by from the centroid of their list, uint8
            `[num_blocks, slots, num_parts]`.
        terms: `[num_blocks, slots]`, as `metrics.terms`; None of inner products, and of codes.
        positions: int32 `[num_blocks, slots]`: which vector of the corpus it is; `NO_ID` of padding.
        codebooks: of lists of codes, what these stand for.
        longest: how many blocks the longest 1, 2, 4, .. lists have together, and all have.
        copies: in how many lists a vector may be at most.
    """

    centroids: jax.Array
    first_block: jax.Array
    vectors: jax.Array
    terms: jax.Array | None
    positions: jax.Array
    longest: tuple[int, ...]
    metric: Metric = field(default="l2")
    copies: int = 1
    codebooks: Codebooks | None = None

    @property
    def num_lists(self) -> int:
        return self.centroids.shape[0]

    @property
    def dim(self) -> int:
        return self.centroids.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.positions.shape[0]

    @property
    def slots(self) -> int:
        """Of a block."""
        return self.positions.shape[1]

    def most_blocks(self, num_lists: int) -> int:
        """So many lists have no more blocks than this, whichever they are."""
        return self.longest[min((num_lists - 1).bit_length(), len(self.longest) - 1)]


def usual_slots(num_vectors: int, num_lists: int) -> int:
    """Of a block."""
    mean = num_vectors / num_lists
    slots = max(_LEAST_SLOTS, min(_SLOTS, _SHARE * mean), min(_MOST_SLOTS, _SHARE_OF_LONG * mean))
    return 1 << (int(slots).bit_length() - 1)


def longest_of(num_blocks: np.ndarray) -> tuple[int, ...]:
    """`InvertedLists.longest`, of lists of so many blocks each."""
    together = np.cumsum(np.sort(num_blocks)[::-1])
    counts = [2**n for n in range((len(together) - 1).bit_length())]
    return (*(int(together[count - 1]) for count in counts), int(together[-1]))


def fill(
    vectors: np.ndarray, centroids: np.ndarray, lists: np.ndarray, metric: Metric, slots: int | None = None
) -> InvertedLists:
    """The lists, filled with vectors.

    Args:
        vectors: `[n, d]`. centroids: `[num_lists, d]`.
        lists: int `[n]`, the list of each vector; or `[n, copies]`, `NO_ID` where a vector is in fewer.
        slots: of a block; `usual_slots` where it is not given.
    """
    laid = _laid(lists, len(centroids), slots)
    positions = _rows(laid.members, laid.places, NO_ID)
    held = jnp.asarray(_rows(vectors, positions, 0))
    return _filled(laid, centroids, held, terms(held, metric), positions, metric, None)


def fill_codes(
    vectors: np.ndarray,
    centroids: np.ndarray,
    lists: np.ndarray,
    metric: Metric,
    codebooks: Codebooks,
    slots: int | None = None,
) -> InvertedLists:
    """The lists, filled with codes of what vectors differ by from their list's centroid; arguments as of `fill`.

    For cosines give unit vectors: a centroid is near to nothing else.
    """
    laid = _laid(lists, len(centroids), slots)
    middle = np.asarray(centroids, np.float32)
    codes = np.zeros((len(laid.members), codebooks.num_parts), np.uint8)
    for at in range(0, len(codes), _ENCODED_AT_ONCE):
        part = slice(at, at + _ENCODED_AT_ONCE)
        codes[part] = encode(codebooks, jnp.asarray(vectors[laid.members[part]] - middle[laid.owners[part]]))
    positions = _rows(laid.members, laid.places, NO_ID)
    held = jnp.asarray(_rows(codes, laid.places, 0))
    return _filled(laid, middle, held, None, positions, metric, codebooks)


class _Laid(NamedTuple):
    """Where vectors go.

    members: int32: vectors by position, list by list; one of several lists is there several times. owners: the list of
    each. num_blocks: of each list. places: `[num_blocks, slots]`, which of `members` is in each slot; -1: padding.
    """

    members: np.ndarray
    owners: np.ndarray
    num_blocks: np.ndarray
    places: np.ndarray
    copies: int


def _laid(lists: np.ndarray, num_lists: int, slots: int | None) -> _Laid:
    lists = lists if lists.ndim == 2 else lists[:, None]
    member, column = np.nonzero(lists != NO_ID)
    owner = lists[member, column]
    by_list = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=num_lists)
    start = np.cumsum(counts) - counts
    slots = slots or usual_slots(len(member), num_lists)
    num_blocks = np.maximum(1, -(-counts // slots))
    block_owner = np.repeat(np.arange(num_lists), num_blocks)
    block = np.arange(len(block_owner)) - (np.cumsum(num_blocks) - num_blocks)[block_owner]  # within its list
    slot = block[:, None] * slots + np.arange(slots)
    places = np.where(slot < counts[block_owner, None], start[block_owner, None] + slot, -1)
    return _Laid(member[by_list].astype(np.int32), owner[by_list], num_blocks, places, lists.shape[1])


def _rows(of: np.ndarray, which: np.ndarray, padding: int) -> np.ndarray:
    """`of[which]`, with `padding` where `which` is negative."""
    found = of[np.maximum(which, 0)]
    found[which < 0] = padding
    return found


def _filled(
    laid: _Laid,
    centroids: np.ndarray,
    held: jax.Array,
    term: jax.Array | None,
    positions: np.ndarray,
    metric: Metric,
    codebooks: Codebooks | None,
) -> InvertedLists:
    first = np.concatenate([[0], np.cumsum(laid.num_blocks)]).astype(np.int32)
    return InvertedLists(
        jnp.asarray(centroids, jnp.float32),
        jnp.asarray(first),
        held,
        term,
        jnp.asarray(positions),
        longest_of(laid.num_blocks),
        metric,
        laid.copies,
        codebooks,
    )


def members(index: InvertedLists) -> Sequence[np.ndarray]:
    """The positions in each list, in the order of `centroids`: for a look at an index, and for tests."""
    rows = np.split(np.asarray(index.positions), np.asarray(index.first_block)[1:-1])
    return [row[row != NO_ID] for row in rows]


def lists_of(index: InvertedLists, num_vectors: int) -> np.ndarray:
    """int32 `[num_vectors, copies]`: the lists that each vector is in; `NO_ID` where it is in fewer."""
    held = members(index)
    owner = np.repeat(np.arange(len(held), dtype=np.int32), [len(each) for each in held])
    member = np.concatenate(held)
    order = np.argsort(member, kind="stable")
    owner, member = owner[order], member[order]
    found = np.full((num_vectors, index.copies), NO_ID, np.int32)
    found[member, np.arange(len(member)) - np.searchsorted(member, member)] = owner
    return found
