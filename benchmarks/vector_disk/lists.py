"""Lists on disk, 50,000 int8 vectors of 100 elements, for each of three random seeds; and 1,000,000 for one.

`synthetic` is FAISS's synthetic set, `million` the same with 1,000,000 vectors, `text` the documentation on this machine
(hashed TF-IDF with an SVD), at most as many vectors as there are passages; the seed draws the set, or which passages are
queries. 500 queries are searched one by one by the effort that `build_on_disk` chose for a recall target of 0.95. A simple
layout starts each list at a page, and a query probes as many lists as a recall of 0.95 needs on these very queries. For
`synthetic` the best one is 126 pages: 5,000 lists with closure, of 400, 1,500 and 5,000, measured before this benchmark.
For `text` it is the best of 400 and 1,500 lists, with and without closure (up to 8 lists within 10 %), measured here. For
`million`, where to train other centroids takes an hour, it has the centroids of the index, and the best closure of those
within 0, 5, 10, 14 and 18 %. Bytes used are those of the probed lists. The Zipf batch has 256 queries, the i-th of which is
drawn with probability 1 / i.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import vector_search
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.closure import closure
from autopar.vector_search.ivf.lists import fill
from autopar.vector_search.kernels.k_means import k_means
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from benchmarks.synthetic_vectors import faiss_synthetic

Row = dict[str, Any]

NUM_VECTORS, DIM, NUM_QUERIES, K = 50_000, 100, 500, 10
#: Queries of a batch, and of the comparison with lists in memory.
BATCH, COMPARED = 256, 256
#: Vectors of larger sets.
_LARGE = {"million": 1_000_000}
#: Closures of the simple layouts of larger sets.
REACHES = (0.0, 0.05, 0.1, 0.14, 0.18)
#: Lists of the simple layouts, and pages per query of the best one where it is known.
SIMPLE_LISTS, KNOWN_PAGES = (400, 1_500), {"synthetic": 126.0}
RECALL = 0.95


def measure(of: str, num_vectors: int = NUM_VECTORS) -> list[Row]:
    """The rows of one data set and seed, as "synthetic, 21"."""
    name, seed = of.split(", ")
    return _measured(name, int(seed), _LARGE.get(name, num_vectors))


def _measured(of: str, seed: int, num_vectors: int) -> list[Row]:
    corpus, queries = data_of(of, seed, num_vectors)
    nearest = nearest_of(corpus, queries)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        index = vector_search.build_on_disk(corpus, Path(folder) / "index", recall_target=RECALL, progress=False)
        build_s = time.process_time() - started
        index.search(queries[:1], K)
        before, io_before = index.reads(), read_bytes()
        pages, found = [], []
        for query in queries:
            start = index.reads().pages
            found.append(index.search(query, K).ids)
            pages.append(index.reads().pages - start)
        after, io_after = index.reads(), read_bytes()
        draw = np.random.default_rng(seed)
        share = 1 / np.arange(1, len(queries) + 1)
        batch = draw.choice(len(queries), BATCH, p=share / share.sum())
        index.search(queries[batch], K)
        zipf = (index.reads().pages - after.pages) / sum(pages[which] for which in batch)
        assigned = _assigned(index, len(corpus))
        differing = _differing(index, corpus, queries[:COMPARED], assigned)
        recall = recall_of(corpus, queries, nearest, np.stack(found))
        simple = alike = KNOWN_PAGES.get(of, float("nan"))
        if of not in KNOWN_PAGES:
            layouts = _simple_layouts(corpus) if of not in _LARGE else _closures(corpus, index.lists.centroids)
            both = [pages_of(corpus, queries, nearest, *each, (RECALL, recall)) for each in layouts]
            simple, alike = (min(each) for each in zip(*both, strict=True))
        details = index.stats().details
        index.close()
    num, num_bytes = len(queries), after.num_bytes - before.num_bytes
    case = f"{of}, seed {seed}"
    on_device = (io_after - io_before) / num_bytes if details["reader"] != "mmap" else float("nan")
    figures: list[tuple[str, float, float | None, bool | None]] = [
        ("recall@10", recall, RECALL, True),
        ("pages per query", float(np.mean(pages)), 0.8 * simple, False),
        ("requests per query", (after.requests - before.requests) / num, 40, False),
        ("bytes used of bytes read", (after.used_bytes - before.used_bytes) / num_bytes, 0.8, True),
        ("pages of a Zipf batch of 256, of singles", zipf, 0.5, False),
        ("pages of the best simple layout", simple, None, None),
        *([] if of in KNOWN_PAGES else [("pages of the best simple layout at the same recall", alike, None, None)]),
        ("results that differ from lists in memory", differing, 0, False),
        ("bytes by /proc/self/io, of bytes counted", on_device, None, None),
        ("entries per vector", details["space"], None, None),
        ("file bytes per byte of vectors", details["file_bytes"] / corpus.nbytes, None, None),
        ("lists", details["num_lists"], None, None),
        ("maximum lists per query", details["effort"], None, None),
        ("CPU seconds of the build", build_s, None, None),
    ]
    return rows_of(case, figures)


def rows_of(case: str, figures: Sequence[tuple[str, float, float | None, bool | None]]) -> list[Row]:
    """A row for each figure: its name, value, gate, and whether the gate is the least value."""
    rows: list[Row] = []
    for figure, measured, gate, is_least in figures:
        met: bool | str = "" if gate is None else bool(measured >= gate if is_least else measured <= gate)
        if figure.startswith("bytes by") and np.isfinite(measured):
            gate, met = 1.0, abs(measured - 1) <= 0.01
        rows.append(
            {"case": case, "figure": figure, "measured": measured, "gate": "" if gate is None else gate, "met": met}
        )
    return rows


def _simple_layouts(corpus: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Centroids, and the lists of each vector, without and with closure."""
    wide = jnp.asarray(corpus, jnp.float32)
    for num_lists in SIMPLE_LISTS:
        if num_lists <= len(corpus):
            clusters = k_means(wide, num_lists)
            closed = closure(wide, clusters.centroids, clusters.lists, 8, 1.1)
            yield np.asarray(clusters.centroids), np.asarray(clusters.lists)[:, None]
            yield np.asarray(clusters.centroids), np.asarray(closed)


def pages_of(
    corpus: np.ndarray,
    queries: np.ndarray,
    nearest: np.ndarray,
    centroids: np.ndarray,
    lists: np.ndarray,
    recalls: Sequence[float] = (RECALL,),
) -> list[float]:
    """Pages per query of a simple layout that probes as many lists as reach each recall.

    Args:
        lists: int32 `[n, copies]`, of each vector; `NO_ID` for fewer.
    """
    num_lists, entry = len(centroids), 8 + corpus.shape[1] * corpus.dtype.itemsize  # a 64-bit id
    near = np.argsort(((centroids**2).sum(axis=1)[None] - 2 * queries.astype(np.float32) @ centroids.T), axis=1)
    rank = np.argsort(near, axis=1)
    held = lists[nearest]
    ranks = np.where(held == NO_ID, num_lists, np.take_along_axis(rank[:, None], np.maximum(held, 0), axis=2))
    needed = np.sort(ranks.min(axis=2).reshape(-1))
    probes = [int(needed[int(np.ceil(recall * needed.size)) - 1]) + 1 for recall in recalls]
    counts = np.bincount(lists[lists != NO_ID], minlength=num_lists)
    pages = -(-counts * entry // PAGE_BYTES)
    return [float(pages[near[:, :num]].sum(axis=1).mean()) for num in probes]


def _closures(corpus: np.ndarray, centroids: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The centroids, and the lists of each vector by some closures."""
    lists, ratios = np.zeros((len(corpus), 8), np.int32), np.zeros((len(corpus), 8), np.float32)
    for start in range(0, len(corpus), 8_192):
        some = corpus[start : start + 8_192].astype(np.float32)
        found = np.asarray(closure(jnp.asarray(some), jnp.asarray(centroids), None, 8, 1 + max(REACHES), chunk=1024))
        far = np.stack([((some - centroids[column]) ** 2).sum(axis=1) for column in found.T], axis=1)
        lists[start : start + 8_192] = found
        ratios[start : start + 8_192] = np.sqrt(far / np.maximum(far[:, :1], 1))
    within = lambda reach: np.where((ratios <= 1 + reach) & (lists != NO_ID), lists, NO_ID)  # noqa: E731
    for reach in REACHES:
        yield centroids, within(reach) if reach else lists[:, :1]


def _assigned(index: vector_search.DiskIndex, num_vectors: int) -> np.ndarray:
    """int32 `[n, copies]`: the lists of each vector, as the file has them; `NO_ID` for fewer."""
    found = np.full((num_vectors, index.lists.copies), NO_ID, np.int32)
    for entries in index.searches.reads.entries(np.arange(index.lists.num_lists)):
        members = np.split(entries.positions, np.cumsum(entries.counts)[:-1])
        for which, rows in zip(entries.lists, members, strict=True):
            found[rows, (found[rows] == NO_ID).argmax(axis=1)] = which
    return found


def _differing(index: vector_search.DiskIndex, corpus: np.ndarray, queries: np.ndarray, assigned: np.ndarray) -> int:
    """The results whose distance differs from that of the same lists in memory; equally near vectors may be in any
    order."""
    stored, effort = index.lists, index.measured.effort
    lists = fill(corpus, stored.centroids, assigned, stored.metric)
    search = jax.jit(list_search.search, static_argnums=(2, 3))
    there = np.asarray(search(lists, jnp.asarray(queries), K, effort).positions)
    here = index.search(queries, K, effort=effort).ids
    return int((squared_distances(corpus, queries, here) != squared_distances(corpus, queries, there)).sum())


def squared_distances(corpus: np.ndarray, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """int64 `[num_queries, k]`, of the vectors at these positions."""
    return ((corpus[ids].astype(np.int64) - queries[:, None].astype(np.int64)) ** 2).sum(axis=-1)


def nearest_of(corpus: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Positions of the true neighbours, `[num_queries, K]`."""
    wide = corpus.astype(np.float32)
    squares = (wide**2).sum(axis=1)
    parts = np.array_split(queries.astype(np.float32), 20)
    return np.concatenate([np.argsort(squares - 2 * part @ wide.T, axis=1)[:, :K] for part in parts])


def recall_of(corpus: np.ndarray, queries: np.ndarray, nearest: np.ndarray, ids: np.ndarray) -> float:
    """Of vectors at equal distance from a query, any counts."""
    last = squared_distances(corpus, queries, nearest)[:, -1:]
    return float((squared_distances(corpus, queries, ids) <= last).mean())


def data_of(of: str, seed: int, num_vectors: int) -> tuple[np.ndarray, np.ndarray]:
    """Corpus and queries, int8."""
    if of != "text":
        data = faiss_synthetic(DIM, 0, num_vectors, NUM_QUERIES, seed)
        return _bytes_of(data.corpus, 1.0), _bytes_of(data.queries, 1.0)
    vectors = _text(num_vectors)
    is_query = np.zeros(len(vectors), bool)
    is_query[np.random.default_rng(seed).permutation(len(vectors))[:NUM_QUERIES]] = True
    largest = float(np.quantile(np.abs(vectors), 0.9999))
    return _bytes_of(vectors[~is_query], largest), _bytes_of(vectors[is_query], largest)


def _text(num_vectors: int) -> np.ndarray:
    from examples.documentation import passages, words_model

    texts = [one.text for one in passages(num_vectors + NUM_QUERIES)]
    return words_model(texts, DIM).vectors(texts)


def _bytes_of(vectors: np.ndarray, largest: float) -> np.ndarray:
    return np.clip(np.round(vectors * (127 / largest)), -127, 127).astype(np.int8)


def read_bytes() -> int:
    """Bytes that this process has read from devices."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])
