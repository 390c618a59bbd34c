"""Measure inverted lists of vectors against FAISS's IVF-Flat: `build_lists`, and `list_search` also in FAISS's lists.

Gate: at the first setting that finds 95 % of the neighbours, at least 0.6 times the queries per second of FAISS at the
same recall. `beside` is that ratio. With FAISS's centroids and lists, both find the same neighbours, so only the search
differs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.build import build_lists
from autopar.vector_search.ivf.lists import InvertedLists, fill
from benchmarks.vector_search.contenders import Gate, Row, Searcher, built, measured
from benchmarks.vector_search.data import NUM_QUERIES, NUM_VECTORS, K, Searched, searched
from benchmarks.vector_search.faiss_at_its_best import faiss

OWN, THEIRS = "autopar IVF", "FAISS IVF-Flat"
PROBES = (4, 8, 16, 32, 64, 128)
GATE = Gate(OWN, THEIRS, "queries_per_s", 0.6)
ROUNDS = 7


def measure(of: str, num_vectors: int = NUM_VECTORS, num_queries: int = NUM_QUERIES, rounds: int = ROUNDS) -> list[Row]:
    """A row for each method and number of probes, on one of `data.SETS`."""
    data = searched(of, num_vectors, num_queries)
    num_lists = round(1.6 * len(data.corpus) ** 0.5)  # 512 for 100,000
    own, own_s = built(lambda: jax.block_until_ready(build_lists(data.corpus, "l2", num_lists)))
    index, faiss_s = built(lambda: faiss_lists(data.corpus, num_lists))
    shared, shared_s = built(lambda: with_lists_of(index, data.corpus))
    searchers = [
        *_of_autopar(OWN, own, data, own_s),
        *_of_autopar(f"{OWN}, FAISS's lists", shared, data, faiss_s + shared_s),
        *(Searcher(THEIRS, f"{probes} probes", partial(_faiss, index, data, probes), faiss_s) for probes in PROBES),
    ]
    return measured("ivf", of, data, searchers, GATE, rounds)


def _of_autopar(name: str, lists: InvertedLists, data: Searched, build_s: float) -> list[Searcher]:
    def run(probes: int) -> Any:
        search = jax.jit(partial(list_search.search, k=K, num_probes=probes))
        return lambda: np.asarray(search(lists, jnp.asarray(data.queries)).positions)

    return [Searcher(name, f"{probes} probes", run(probes), build_s) for probes in PROBES]


def faiss_lists(corpus: np.ndarray, num_lists: int) -> Any:
    """An IVF-Flat index of FAISS."""
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(corpus.shape[1]), corpus.shape[1], num_lists)
    index.train(corpus)  # pyright: ignore[reportCallIssue]
    index.add(corpus)  # pyright: ignore[reportCallIssue]
    return index


def with_lists_of(index: Any, corpus: np.ndarray) -> InvertedLists:
    """Inverted lists with the same centroids and the same vectors in each list."""
    lists = index.quantizer.search(corpus, 1)[1][:, 0]
    return fill(corpus, index.quantizer.reconstruct_n(0, index.nlist), lists, "l2")


def _faiss(index: Any, data: Searched, probes: int) -> np.ndarray:
    index.nprobe = probes
    return index.search(data.queries, K)[1]
