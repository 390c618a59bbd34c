"""Make the data sets: FAISS's synthetic set, clusters of very unequal size, and the text on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from benchmarks.synthetic_vectors import faiss_synthetic, skewed_clusters
from benchmarks.vector_search.faiss_at_its_best import faiss
from examples.documentation import passages, words_model

DIM = 128
#: The maximum; the text has as many vectors as the machine has passages.
NUM_VECTORS, NUM_QUERIES, K = 100_000, 1000, 10


class Searched(NamedTuple):
    """A corpus `[n, d]` and queries `[num_queries, d]` in f32; no query is in the corpus.

    `nearest`, `[num_queries, k]`, has the squared distances of the true neighbours, nearest first.
    """

    corpus: np.ndarray
    queries: np.ndarray
    nearest: np.ndarray


def searched(name: str, num_vectors: int = NUM_VECTORS, num_queries: int = NUM_QUERIES) -> Searched:
    """The data set of this name in `SETS`."""
    corpus, queries = SETS[name](num_vectors, num_queries)
    flat = faiss.IndexFlatL2(corpus.shape[1])
    flat.add(corpus)  # pyright: ignore[reportCallIssue]
    return Searched(corpus, queries, flat.search(queries, K)[0])  # pyright: ignore[reportCallIssue]


def recall(data: Searched, ids: np.ndarray) -> float:
    """The share of the true neighbours that were found; of vectors at equal distance from a query, any counts."""
    found = np.where(ids[..., None] < 0, np.inf, data.corpus[ids]) - data.queries[:, None]
    squared = np.einsum("qkd,qkd->qk", found, found)
    return float(np.mean(squared <= data.nearest[:, -1:] * (1 + 1e-4) + 1e-6))


def _synthetic(num_vectors: int, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    data = faiss_synthetic(DIM, 0, num_vectors, num_queries)
    return data.corpus, data.queries


def _skewed(num_vectors: int, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    data = skewed_clusters(DIM, num_vectors, num_queries)
    return data.corpus, data.queries


def _text(num_vectors: int, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of passages; evenly spaced ones are the queries."""
    texts = [one.text for one in passages(num_vectors + num_queries)]
    vectors = words_model(texts, DIM).vectors(texts)
    is_query = np.zeros(len(vectors), bool)
    is_query[np.linspace(0, len(vectors) - 1, num_queries).astype(int)] = True
    return vectors[~is_query], vectors[is_query]


#: By name. Read-only.
SETS: Mapping[str, Callable[[int, int], tuple[np.ndarray, np.ndarray]]] = MappingProxyType(
    {"synthetic": _synthetic, "skewed": _skewed, "text": _text}
)
