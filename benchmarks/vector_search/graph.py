"""Measure graph search: `build_graph` and `beam`, against FAISS's HNSW, and hnswlib and usearch if installed.

Gate: at the first setting that finds 95 % of the neighbours, at most 1.3 times the distance computations of FAISS's
HNSW at the same recall. `beside` is that ratio. Queries per second have no gate: on a CPU, the gathers and sorts of a
batched search are slower than one query at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.build import build_graph
from benchmarks.vector_search.contenders import CORES, Gate, Row, Searcher, built, is_here, measured
from benchmarks.vector_search.data import NUM_QUERIES, NUM_VECTORS, K, Searched, searched
from benchmarks.vector_search.faiss_at_its_best import faiss

OWN, THEIRS = "autopar graph", "FAISS HNSW"
#: Beam widths, for every method.
BEAMS = (16, 32, 48, 64, 96, 128)
DEGREE = 32
#: Beam width while HNSW is built.
BUILD_BEAM = 100
GATE = Gate(OWN, THEIRS, "distances", 1.3)
ROUNDS = 3


def measure(of: str, num_vectors: int = NUM_VECTORS, num_queries: int = NUM_QUERIES, rounds: int = ROUNDS) -> list[Row]:
    """A row for each method and beam width, on one of `data.SETS`."""
    data = searched(of, num_vectors, num_queries)
    searchers = [*_of_autopar(data), *_of_faiss(data)]
    searchers += _of_hnswlib(data) if is_here("hnswlib") else []
    searchers += _of_usearch(data) if is_here("usearch") else []
    return measured("graph", of, data, searchers, GATE, rounds)


def _of_autopar(data: Searched) -> list[Searcher]:
    graph, build_s = built(lambda: jax.block_until_ready(build_graph(data.corpus, "l2", DEGREE)))
    queries = jnp.asarray(data.queries)

    def at(size: int) -> Searcher:
        search = jax.jit(partial(beam.search, k=K, beam=size))
        scored = float(np.mean(search(graph, queries).num_scored))
        return Searcher(OWN, f"beam {size}", lambda: np.asarray(search(graph, queries).positions), build_s, scored)

    return [at(size) for size in BEAMS]


def _of_faiss(data: Searched) -> list[Searcher]:
    index = faiss.IndexHNSWFlat(data.corpus.shape[1], DEGREE // 2)  # the lowest layer has twice this degree
    index.hnsw.efConstruction = BUILD_BEAM
    _, build_s = built(lambda: index.add(data.corpus))  # pyright: ignore[reportCallIssue]

    def search(size: int) -> np.ndarray:
        index.hnsw.efSearch = size
        return index.search(data.queries, K)[1]  # pyright: ignore[reportCallIssue]

    def at(size: int) -> Searcher:
        stats: Any = faiss.cvar
        stats.hnsw_stats.reset()
        search(size)
        scored = stats.hnsw_stats.ndis / len(data.queries)
        return Searcher(THEIRS, f"beam {size}", partial(search, size), build_s, scored)

    return [at(size) for size in BEAMS]


def _of_hnswlib(data: Searched) -> list[Searcher]:
    import hnswlib  # pyright: ignore[reportMissingImports]

    index = hnswlib.Index(space="l2", dim=data.corpus.shape[1])
    index.init_index(max_elements=len(data.corpus), ef_construction=BUILD_BEAM, M=DEGREE // 2)
    index.set_num_threads(CORES)
    _, build_s = built(lambda: index.add_items(data.corpus))

    def search(size: int) -> np.ndarray:
        index.set_ef(size)
        return index.knn_query(data.queries, K)[0].astype(np.int64)

    return [Searcher("hnswlib", f"beam {size}", partial(search, size), build_s) for size in BEAMS]


def _of_usearch(data: Searched) -> list[Searcher]:
    from usearch.index import Index  # pyright: ignore[reportMissingImports]

    index: Any = Index(
        ndim=data.corpus.shape[1],
        metric="l2sq",
        dtype="f32",
        connectivity=DEGREE // 2,
        expansion_add=BUILD_BEAM,
    )
    _, build_s = built(lambda: index.add(np.arange(len(data.corpus)), data.corpus, threads=CORES))

    def search(size: int) -> Any:
        index.expansion_search = size
        return index.search(data.queries, K, threads=CORES)

    def at(size: int) -> Searcher:
        scored = search(size).computed_distances / len(data.queries)
        return Searcher("usearch", f"beam {size}", lambda: search(size).keys.astype(np.int64), build_s, scored)

    return [at(size) for size in BEAMS]
