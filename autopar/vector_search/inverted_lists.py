"""IVF-Flat: vectors in lists around centroids, of which a query is compared with the nearest lists alone.

In: vectors, centroids, and the list of each vector. Out: `InvertedLists`, a pytree of arrays: the lists in a few classes
of size, each padded to one length (`size_classes`). `list_search` searches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from autopar.vector_search.metrics import NO_ID, Metric, terms
from autopar.vector_search.size_classes import size_classes


@partial(register_dataclass, data_fields=["vectors", "terms", "positions"], meta_fields=[])
@dataclass(frozen=True, slots=True)
class ListClass:
    """Lists of one length.

    vectors: `[num_lists, length, d]`. terms: `[num_lists, length]`, as `metrics.terms`; None of inner products.
    positions: int32 `[num_lists, length]`: which vector of the corpus it is; `NO_ID` of padding.
    """

    vectors: jax.Array
    terms: jax.Array | None
    positions: jax.Array


@partial(register_dataclass, data_fields=["centroids", "classes"], meta_fields=["metric", "copies"])
@dataclass(frozen=True, slots=True)
class InvertedLists:
    """centroids: f32 `[num_lists, d]`, in the order of the lists in `classes`. copies: in how many lists a vector may
    be at most."""

    centroids: jax.Array
    classes: tuple[ListClass, ...]
    metric: Metric = field(default="l2")
    copies: int = 1

    @property
    def num_lists(self) -> int:
        return self.centroids.shape[0]

    @property
    def num_slots(self) -> int:
        """Places for vectors, padding too."""
        return sum(each.positions.size for each in self.classes)


def fill(
    vectors: np.ndarray,
    centroids: np.ndarray,
    lists: np.ndarray,
    metric: Metric,
    most_classes: int = 4,
) -> InvertedLists:
    """The lists, filled.

    Args:
        vectors: `[n, d]`. centroids: `[num_lists, d]`.
        lists: int `[n]`, the list of each vector; or `[n, copies]`, `NO_ID` where a vector is in fewer.
        most_classes: how many lengths lists may be padded to.
    """
    lists = lists if lists.ndim == 2 else lists[:, None]
    member, column = np.nonzero(lists != NO_ID)
    owner = lists[member, column]
    counts = np.bincount(owner, minlength=len(centroids))
    by_list = member[np.argsort(owner, kind="stable")]
    start = np.concatenate([[0], np.cumsum(counts)])
    chosen = size_classes(counts, most_classes)
    classes: list[ListClass] = []
    first = 0
    for num, length in zip(chosen.num_lists, chosen.lengths, strict=True):
        these = chosen.order[first : first + num]
        classes.append(_list_class(vectors, by_list, start[these], counts[these], length, metric))
        first += num
    ordered = jnp.asarray(np.asarray(centroids, np.float32)[chosen.order])
    return InvertedLists(ordered, tuple(classes), metric, lists.shape[1])


def _list_class(
    vectors: np.ndarray, by_list: np.ndarray, start: np.ndarray, counts: np.ndarray, length: int, metric: Metric
) -> ListClass:
    slot = np.arange(length)
    is_filled = slot < counts[:, None]
    positions = np.full((len(counts), length), NO_ID, np.int32)
    positions[is_filled] = by_list[(start[:, None] + slot)[is_filled]]
    held = np.zeros((len(counts), length, vectors.shape[1]), vectors.dtype)
    held[is_filled] = vectors[positions[is_filled]]
    placed = jnp.asarray(held)
    term = terms(placed.reshape(-1, vectors.shape[1]), metric)
    return ListClass(placed, None if term is None else term.reshape(positions.shape), jnp.asarray(positions))


def members(index: InvertedLists) -> Sequence[np.ndarray]:
    """The positions in each list, in the order of `centroids`: for a look at an index, and for tests."""
    return [row[row != NO_ID] for each in index.classes for row in np.asarray(each.positions)]
