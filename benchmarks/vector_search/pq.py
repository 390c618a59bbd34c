"""Measure inverted lists of product-quantized codes, with re-ranking, against FAISS's IVF-PQ.

autopar's search is `build_lists`, `list_search` and `rerank`; FAISS's has its own refinement. ScaNN is measured if it
is installed. A code has a byte for every four elements. Gate: with FAISS's codebooks, distances equal FAISS's to one
part in ten thousand. `beside` of autopar's rows is the ratio of queries per second at equal recall, which has no gate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.build import build_lists
from autopar.vector_search.ivf.lists import InvertedLists
from autopar.vector_search.ivf.product_quantization import Codebooks, decode
from autopar.vector_search.kernels.rerank import rerank
from benchmarks.vector_search.contenders import Gate, Row, Searcher, built, is_here, measured
from benchmarks.vector_search.data import NUM_QUERIES, NUM_VECTORS, K, Searched, searched
from benchmarks.vector_search.faiss_at_its_best import faiss

OWN, THEIRS = "autopar IVF-PQ", "FAISS IVF-PQ"
PROBES = (4, 8, 16, 32, 64, 128)
#: Candidates that are scored again, per neighbour.
AGAIN = 10
NO_GATE = Gate(OWN, THEIRS, "queries_per_s", bound=None)
LIKE_FAISS = 1e-4
ROUNDS = 7


def measure(of: str, num_vectors: int = NUM_VECTORS, num_queries: int = NUM_QUERIES, rounds: int = ROUNDS) -> list[Row]:
    """A row for each method and number of probes, on one of `data.SETS`; then the error of the distances."""
    data = searched(of, num_vectors, num_queries)
    dim, num_lists = data.corpus.shape[1], round(1.6 * len(data.corpus) ** 0.5)
    num_parts = dim // 4
    own, own_s = built(lambda: jax.block_until_ready(build_lists(data.corpus, "l2", num_lists, num_parts=num_parts)))
    index, faiss_s = built(lambda: _faiss_codes(data.corpus, num_lists, num_parts))
    searchers = [
        *_of_autopar(own, data, own_s),
        *(Searcher(THEIRS, f"{probes} probes", partial(_faiss, index, data, probes), faiss_s) for probes in PROBES),
        *(_of_scann(data, num_lists) if is_here("scann") else []),
    ]
    rows = measured("pq", of, data, searchers, NO_GATE, rounds)
    off = distances_off(data, num_parts)
    same = dict.fromkeys(rows[0], "") | {"part": "pq", "data": of, "vectors": len(data.corpus)}
    same |= {"method": f"{OWN}, FAISS's codebooks", "setting": "largest difference of a distance, relative"}
    return [*rows, {**same, "beside": off, "gate": LIKE_FAISS, "met": off <= LIKE_FAISS}]


def _of_autopar(lists: InvertedLists, data: Searched, build_s: float) -> list[Searcher]:
    vectors = jnp.asarray(data.corpus)

    def run(probes: int) -> Any:
        @jax.jit
        def search(lists: InvertedLists, vectors: jax.Array, queries: jax.Array) -> jax.Array:
            candidates = list_search.search(lists, queries, AGAIN * K, probes).positions
            return rerank(vectors, queries, candidates, K, "l2").positions

        return lambda: np.asarray(search(lists, vectors, jnp.asarray(data.queries)))

    return [Searcher(OWN, f"{probes} probes", run(probes), build_s) for probes in PROBES]


def _faiss_codes(corpus: np.ndarray, num_lists: int, num_parts: int) -> Any:
    dim = corpus.shape[1]
    codes = faiss.IndexIVFPQ(faiss.IndexFlatL2(dim), dim, num_lists, num_parts, 8)
    index = faiss.IndexRefineFlat(codes)
    index.k_factor = AGAIN
    index.train(corpus)  # pyright: ignore[reportCallIssue]
    index.add(corpus)  # pyright: ignore[reportCallIssue]
    return index, codes


def _faiss(index: Any, data: Searched, probes: int) -> np.ndarray:
    refined, codes = index
    codes.nprobe = probes
    return refined.search(data.queries, K)[1]


def _of_scann(data: Searched, num_lists: int) -> list[Searcher]:
    from scann.scann_ops.py import scann_ops_pybind  # pyright: ignore[reportMissingImports]

    def make() -> Any:
        builder = scann_ops_pybind.builder(data.corpus, K, "squared_l2")
        builder = builder.tree(num_lists, PROBES[-1], training_sample_size=len(data.corpus))
        return builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(AGAIN * K).build()

    index, build_s = built(make)

    def run(probes: int) -> Any:
        found = lambda: index.search_batched_parallel(data.queries, leaves_to_search=probes)[0]  # noqa: E731
        return lambda: np.asarray(found()).astype(np.int64)

    return [Searcher("ScaNN", f"{probes} probes", run(probes), build_s) for probes in PROBES]


def distances_off(data: Searched, num_parts: int) -> float:
    """The largest relative difference between our asymmetric distances and FAISS's, with its codebooks and codes."""
    dim = data.corpus.shape[1]
    index = faiss.IndexPQ(dim, num_parts, 8)
    index.train(data.corpus)  # pyright: ignore[reportCallIssue]
    index.add(data.corpus)  # pyright: ignore[reportCallIssue]
    found, ids = index.search(data.queries, K)  # pyright: ignore[reportCallIssue]
    centroids = faiss.vector_to_array(index.pq.centroids).reshape(num_parts, 256, dim // num_parts)
    codes = faiss.vector_to_array(index.codes).reshape(-1, num_parts)
    stand_for = decode(Codebooks(jnp.asarray(centroids)), jnp.asarray(codes[ids]))
    ours = jnp.sum((jnp.asarray(data.queries)[:, None] - stand_for) ** 2, axis=-1)
    return float(np.max(np.abs(np.asarray(ours) - found) / np.maximum(found, 1e-6)))
