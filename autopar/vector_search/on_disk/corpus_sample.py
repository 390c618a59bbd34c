"""Sample a corpus that is read in chunks: vectors to train with, and queries with their true neighbours.

In: chunks. Out: a uniform sample; and `RecallSample`, which finds the true neighbours of some queries as chunks pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.duplicates import row_hashes
from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.data.progress import Report
from autopar.vector_search.frame.recall_tuning import MEASURED_AT
from autopar.vector_search.on_disk.chunks import Chunks
from autopar.vector_search.on_disk.list_scores import ListScores

#: Maximum positions that are kept of the vectors that equal a query.
_MAX_EQUAL = 64


def surveyed(chunks: Chunks, max_bytes: float) -> NDArray[Any]:
    """Read the corpus once. A uniform sample of it, `[m, d]`, in random order: the vectors with the smallest keys."""
    draw = np.random.default_rng(0)
    keys, kept, most = np.zeros(0), [], 0
    for _, chunk in chunks:
        most = most or max(1024, int(max_bytes / (4 * chunk.shape[1])))
        keys = np.concatenate([keys, draw.random(len(chunk))])
        kept.append(chunk.copy())
        if len(keys) > 2 * most:
            few = np.argpartition(keys, most)[:most]
            keys, kept = keys[few], [np.concatenate(kept)[few]]
    if not kept:
        return np.zeros((0, 1), np.float32)
    return np.concatenate(kept)[np.argsort(keys, kind="stable")[:most]]


def checked_corpus(
    chunks: Chunks, path: Path, ids: ArrayLike | None, queries: ArrayLike | None, max_bytes: float, report: Report
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[np.int64] | None]:
    """Read the corpus once: `surveyed`, the user's queries and the user's ids.

    Args:
        path: the file to write.
        max_bytes: of the sample.

    Raises:
        SearchError: invalid vectors, ids or queries, or no folder to write to.
    """
    if not path.parent.is_dir():
        raise SearchError(f"`path` is {str(path)!r}, and its folder does not exist: create it")
    report("sample the corpus", 0.0)
    sampled = surveyed(chunks, max_bytes)
    num = chunks.num_vectors
    if num == 0:
        raise SearchError("`vectors` is empty: an index on disk needs at least one vector")
    if num > inputs.MAX_VECTORS:
        raise SearchError(f"`vectors` has {num:,} rows: one index holds at most {inputs.MAX_VECTORS:,}")
    checked = None if queries is None else inputs.checked_queries(queries, chunks.dim, chunks.dtype)
    return sampled, checked, None if ids is None else inputs.checked_ids(ids, num)


class Truth(NamedTuple):
    """The true neighbours of queries.

    Args:
        queries: `[num_queries, d]`.
        distances, positions: `[num_queries, k]`, best first; `NO_ID` for none.
    """

    queries: NDArray[Any]
    distances: NDArray[Any]
    positions: NDArray[np.int32]


class RecallSample:
    """Queries, whose true neighbours are found while the chunks of the corpus pass.

    Args:
        sampled: `[m, d]`, distinct vectors of which are the queries if there are no others. Such a query does not count
            itself and its duplicates as neighbours.
        queries: `[num_queries, d]`, the user's; None: of the corpus.
        most: maximum number of queries.
        num_vectors: vectors of the corpus.
    """

    def __init__(
        self,
        sampled: NDArray[Any],
        queries: NDArray[Any] | None,
        metric: Metric,
        centre: NDArray[np.float32] | None,
        most: int,
        num_vectors: int,
    ) -> None:
        self._metric: Metric = metric
        self._own: NDArray[np.uint64] | None = None
        if queries is None:
            queries = sampled[: 4 * most]
            own, first = np.unique(row_hashes(queries, metric), return_index=True)
            order = np.argsort(first, kind="stable")[:most]  # distinct vectors
            queries, self._own = queries[first[order]], own[order]
        self.queries = queries[:most]
        self._nearest = ListScores(self.queries, min(MEASURED_AT, num_vectors), metric, centre, 1)
        #: Positions of the vectors that equal each query, if the queries are of the corpus; at most `_MAX_EQUAL`.
        self.equal: list[list[int]] = [[] for _ in self.queries]

    @property
    def is_of_corpus(self) -> bool:
        """Whether the queries are vectors of the corpus."""
        return self._own is not None

    def add(self, chunk: NDArray[Any], start: int) -> None:
        """Compare the queries with the vectors at consecutive positions."""
        is_other = np.ones((len(self.queries), len(chunk)), bool)
        if self._own is not None:
            is_other = self._own[:, None] != row_hashes(chunk, self._metric)[None]
            for query, place in zip(*np.nonzero(~is_other), strict=True):
                if len(self.equal[query]) < _MAX_EQUAL:
                    self.equal[query].append(start + int(place))
        self._nearest.add(chunk, np.arange(start, start + len(chunk), dtype=np.int32), is_other)

    def truth(self) -> Truth:
        """The true neighbours among all vectors that were added."""
        return Truth(self.queries, *self._nearest.best())
