"""Predict how many neighbours of a query each list holds, and probe the lists that hold enough of them per page.

In: queries with known neighbours. Out: `HitModel`, small tables. A list is worth a read if it holds neighbours that no
nearer list holds. Their expected number is a product of factors, one for the bin of each feature of query and list. The
factors are fitted to the counts of a sample by iterative proportional fitting: those of each feature are scaled in turns
until they predict the neighbours counted in each bin.

A model knows the queries that it was fitted to better than others. So what it expects for the sample itself comes from
cross-fitting: from models of the rest of the sample, one for each of a few parts.

Features: the rank r of the list; d_r / d_1, the distances of the centroids; the distance of the query from the border
between list r and the nearest one, relative to d_1; the vectors of the list; d_r and d_1 relative to the radii of their
lists; d_2 / d_1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk.probing import Nearest

_NUM_FEATURES = 7
#: Bins of a feature; rounds of the fit; neighbours in each bin before any are counted, in means.
_BINS, _ROUNDS, _PRIOR = 24, 15, 0.5
#: Parts of a sample for cross-fitting.
_PARTS = 4
#: Queries whose features are computed at a time, and the largest feature.
_AT_ONCE, _LARGEST = 64, 1e3


class Lists(NamedTuple):
    """What the features need of lists: f32 `[num_lists, d]` centroids, counts and radii, `[num_lists]`."""

    centroids: NDArray[np.float32]
    counts: NDArray[np.int64]
    radii: NDArray[np.float32]


class HitModel(NamedTuple):
    """The tables.

    Args:
        edges: f32 `[num_features, bins - 1]`, upper edges of the bins; infinity beyond the last.
        factors: f32 `[num_features, bins]`.
    """

    edges: NDArray[np.float32]
    factors: NDArray[np.float32]

    def hits(self, nearest: Nearest, lists: Lists) -> NDArray[np.float32]:
        """f32 `[num_queries, width]`: the expected neighbours in each list that no nearer list holds."""
        parts = [
            self._hits(_features(nearest.of(slice(at, at + _AT_ONCE)), lists))
            for at in range(0, len(nearest.lists), _AT_ONCE)
        ]
        return np.concatenate([*parts, np.zeros((0, nearest.lists.shape[1]), np.float32)])

    def _hits(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        return _product(self.factors, _bins(features, self.edges)).astype(np.float32)


class Fitted(NamedTuple):
    """The result of a fit: the model, and f32 `[num_queries, width]`, what models of the other parts of the sample expect
    in each list."""

    model: HitModel
    hits: NDArray[np.float32]


def fitted(nearest: Nearest, lists: Lists, hits: NDArray[np.float32]) -> Fitted:
    """Fit the model to a sample.

    Args:
        nearest: the nearest lists of the sample's queries.
        hits: f32 `[num_queries, width]`, the neighbours in each list that no nearer list holds.
    """
    parts = [_features(nearest.of(slice(at, at + _AT_ONCE)), lists) for at in range(0, len(nearest.lists), _AT_ONCE)]
    features = np.concatenate(parts, axis=1)
    edges = np.stack([_edges(feature.reshape(-1)) for feature in features])
    edges[0] = _edges(np.geomspace(1, features.shape[2] + 1, 4 * _BINS).round() - 1.5)
    bins = _bins(features, edges)
    del parts, features
    expected, part_of = np.zeros(hits.shape, np.float32), np.arange(len(hits)) % _PARTS
    for part in range(_PARTS):
        is_here = part_of == part
        expected[is_here] = _product(_factors(bins[:, ~is_here], hits[~is_here]), bins[:, is_here])
    return Fitted(HitModel(edges, _factors(bins, hits)), expected)


def _factors(bins: NDArray[np.uint8], hits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The factors that predict the hits, f32 `[num_features, bins]`."""
    counted = hits.reshape(-1).astype(np.float64)
    bins = bins.reshape(len(bins), -1)
    mean = max(counted.sum() / max(1, counted.size), 1e-9)
    wanted = [np.bincount(own, counted, _BINS) + _PRIOR * mean for own in bins]
    factors = np.ones((len(bins), _BINS))
    factors[0] = mean
    predicted = np.full(counted.size, mean)
    for _ in range(_ROUNDS):
        for at, own in enumerate(bins):
            scale = wanted[at] / (np.bincount(own, predicted, _BINS) + _PRIOR * mean)
            factors[at] *= scale
            predicted *= scale[own]
    return factors.astype(np.float32)


def first_hits(ranks: NDArray[np.int32], width: int) -> NDArray[np.float32]:
    """f32 `[num_queries, width]`: the neighbours in each list that no nearer list holds.

    Args:
        ranks: `[num_queries, k]`, rank of the nearest list that holds each neighbour; `NO_ID` or `width` for none.
    """
    found = np.zeros((len(ranks), width), np.float32)
    query, which = np.nonzero((ranks != NO_ID) & (ranks < width))
    np.add.at(found, (query, ranks[query, which]), 1)
    return found


def _features(nearest: Nearest, lists: Lists) -> NDArray[np.float32]:
    """f32 `[num_features, num_queries, width]`."""
    near, distances = nearest.lists, nearest.distances
    tiny = np.finfo(np.float32).tiny
    first = np.maximum(distances[:, :1], tiny)
    centroids = lists.centroids[near]
    gaps = np.sqrt(((centroids - centroids[:, :1]) ** 2).sum(axis=2))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        border = (distances**2 - first**2) / (2 * np.maximum(gaps, tiny) * first)
        border[:, 0] = 0
        radii = np.maximum(lists.radii[near], tiny)
        features = (
            np.broadcast_to(np.arange(near.shape[1], dtype=np.float32), near.shape),
            distances / first,
            border,
            lists.counts[near].astype(np.float32),
            distances / radii,
            np.broadcast_to(first / radii[:, :1], near.shape),
            np.broadcast_to(distances[:, 1:2] / first if near.shape[1] > 1 else first / first, near.shape),
        )
    return np.nan_to_num(np.stack(features).astype(np.float32), nan=0, posinf=_LARGEST).clip(-_LARGEST, _LARGEST)


def _edges(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Upper edges of bins with about as many values each, `[bins - 1]`."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1)[1:-1]).astype(np.float32))
    return np.pad(edges, (0, _BINS - 1 - len(edges)), constant_values=np.inf)


def _bins(features: NDArray[np.float32], edges: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bins of features, of their shape."""
    return np.stack([np.searchsorted(edge, own) for edge, own in zip(edges, features, strict=True)]).astype(np.uint8)


def _product(factors: NDArray[np.float32], bins: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The product of the factors of bins, `[num_features, ...]`."""
    found = np.ones(bins.shape[1:])
    for own, which in zip(factors, bins, strict=True):
        found *= own[which]
    return found


def why_invalid(model: HitModel) -> str | None:
    """Why arrays of a file are no model, as text."""
    shapes = ((_NUM_FEATURES, _BINS - 1), (_NUM_FEATURES, _BINS))
    for name, array, shape in zip(("hit_edges", "hit_factors"), model, shapes, strict=True):
        if array.dtype != np.float32 or array.shape != shape:
            return f"`{name}` is {array.dtype} of shape {list(array.shape)}, expected float32 of shape {list(shape)}"
        if np.isnan(array).any():
            return f"`{name}` has elements that are not numbers"
    return None
