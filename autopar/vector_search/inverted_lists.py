"""IVF: vectors in lists around centroids, of which a query is compared with the nearest lists alone.

In: vectors, centroids, and the list of each vector. Out: `InvertedLists`, a pytree of arrays: the lists in a few classes
of size, each padded to one length (`size_classes`). They hold the vectors (`fill`, IVF-Flat), or their codes
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

from autopar.vector_search.metrics import NO_ID, Metric, terms
from autopar.vector_search.product_quantisation import Codebooks, encode
from autopar.vector_search.size_classes import size_classes

#: Vectors.
_ENCODED_AT_ONCE = 65536


@partial(register_dataclass, data_fields=["vectors", "terms", "positions", "origins"], meta_fields=[])
@dataclass(frozen=True, slots=True)
class ListClass:
    """Lists of one length.

    vectors: `[num_lists, length, d]`, or codes, uint8 `[num_lists, length, num_parts]`.
    terms: `[num_lists, length]`, as `metrics.terms`; None of inner products, and of codes.
    positions: int32 `[num_lists, length]`: which vector of the corpus it is; `NO_ID` of padding.
    origins: f32 `[num_lists, d]`: what the codes of a list are relative to; None of vectors.
    """

    vectors: jax.Array
    terms: jax.Array | None
    positions: jax.Array
    origins: jax.Array | None = None


@partial(register_dataclass, data_fields=["centroids", "classes", "codebooks"], meta_fields=["metric", "copies"])
@dataclass(frozen=True, slots=True)
class InvertedLists:
    """centroids: f32 `[num_lists, d]`, in the order of the lists in `classes`. copies: in how many lists a vector may
    be at most. codebooks: of lists of codes, what these stand for."""

    centroids: jax.Array
    classes: tuple[ListClass, ...]
    metric: Metric = field(default="l2")
    copies: int = 1
    codebooks: Codebooks | None = None

    @property
    def num_lists(self) -> int:
        return self.centroids.shape[0]

    @property
    def num_slots(self) -> int:
        """Places for vectors, padding too."""
        return sum(each.positions.size for each in self.classes)


def fill(
    vectors: np.ndarray, centroids: np.ndarray, lists: np.ndarray, metric: Metric, most_classes: int = 4
) -> InvertedLists:
    """The lists, filled with vectors.

    Args:
        vectors: `[n, d]`. centroids: `[num_lists, d]`.
        lists: int `[n]`, the list of each vector; or `[n, copies]`, `NO_ID` where a vector is in fewer.
        most_classes: how many lengths lists may be padded to.
    """
    laid = _laid(lists, len(centroids), most_classes)
    classes: list[ListClass] = []
    for places in laid.places:
        positions = _rows(laid.members, places, NO_ID)
        held = jnp.asarray(_rows(vectors, positions, 0))
        classes.append(ListClass(held, terms(held, metric), jnp.asarray(positions)))
    ordered = jnp.asarray(np.asarray(centroids, np.float32)[laid.order])
    return InvertedLists(ordered, tuple(classes), metric, laid.copies)


def fill_codes(
    vectors: np.ndarray,
    centroids: np.ndarray,
    lists: np.ndarray,
    metric: Metric,
    codebooks: Codebooks,
    most_classes: int = 4,
) -> InvertedLists:
    """The lists, filled with codes of what vectors differ by from their list's centroid; arguments as of `fill`.

    For cosines give unit vectors: a centroid is near to nothing else.
    """
    laid = _laid(lists, len(centroids), most_classes)
    middle = np.asarray(centroids, np.float32)
    codes = np.zeros((len(laid.members), codebooks.num_parts), np.uint8)
    for at in range(0, len(codes), _ENCODED_AT_ONCE):
        part = slice(at, at + _ENCODED_AT_ONCE)
        codes[part] = encode(codebooks, jnp.asarray(vectors[laid.members[part]] - middle[laid.owners[part]]))
    ordered = middle[laid.order]
    ends = np.cumsum([len(places) for places in laid.places])
    classes = [
        ListClass(
            jnp.asarray(_rows(codes, places, 0)),
            None,
            jnp.asarray(_rows(laid.members, places, NO_ID)),
            jnp.asarray(ordered[end - len(places) : end]),
        )
        for places, end in zip(laid.places, ends, strict=True)
    ]
    return InvertedLists(jnp.asarray(ordered), tuple(classes), metric, laid.copies, codebooks)


class _Laid(NamedTuple):
    """Where vectors go.

    members: int32: vectors by position, list by list; one of several lists is there several times. owners: the list of
    each. order: the lists, those of the first class first. places: of each class `[num_lists, length]`, which of
    `members` is in each slot; -1: padding.
    """

    members: np.ndarray
    owners: np.ndarray
    order: np.ndarray
    places: list[np.ndarray]
    copies: int


def _laid(lists: np.ndarray, num_lists: int, most_classes: int) -> _Laid:
    lists = lists if lists.ndim == 2 else lists[:, None]
    member, column = np.nonzero(lists != NO_ID)
    owner = lists[member, column]
    by_list = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=num_lists)
    start = np.cumsum(counts) - counts
    chosen = size_classes(counts, most_classes)
    places: list[np.ndarray] = []
    first = 0
    for num, length in zip(chosen.num_lists, chosen.lengths, strict=True):
        these = chosen.order[first : first + num]
        slot = np.arange(length)
        places.append(np.where(slot < counts[these, None], start[these, None] + slot, -1))
        first += num
    return _Laid(member[by_list].astype(np.int32), owner[by_list], chosen.order, places, lists.shape[1])


def _rows(of: np.ndarray, which: np.ndarray, padding: int) -> np.ndarray:
    """`of[which]`, with `padding` where `which` is negative."""
    found = of[np.maximum(which, 0)]
    found[which < 0] = padding
    return found


def members(index: InvertedLists) -> Sequence[np.ndarray]:
    """The positions in each list, in the order of `centroids`: for a look at an index, and for tests."""
    return [row[row != NO_ID] for each in index.classes for row in np.asarray(each.positions)]


def lists_of(index: InvertedLists, num_vectors: int) -> np.ndarray:
    """int32 `[num_vectors, copies]`: the lists that each vector is in; `NO_ID` where it is in fewer."""
    owners: list[np.ndarray] = []
    first = 0
    for each in index.classes:
        num = len(each.positions)
        owners.append(np.broadcast_to(np.arange(first, first + num, dtype=np.int32)[:, None], each.positions.shape))
        first += num
    owner = np.concatenate([each.reshape(-1) for each in owners])
    member = np.concatenate([np.asarray(each.positions).reshape(-1) for each in index.classes])
    owner, member = owner[member != NO_ID], member[member != NO_ID]
    order = np.argsort(member, kind="stable")
    owner, member = owner[order], member[order]
    found = np.full((num_vectors, index.copies), NO_ID, np.int32)
    found[member, np.arange(len(member)) - np.searchsorted(member, member)] = owner
    return found
