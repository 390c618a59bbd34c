"""Measure exact search: `autopar.vector_search` against FAISS's flat index and a plain JAX search.

Gates: queries per second, compared with FAISS: at least 0.9 times at batch 1000, and at least 1.5 times at batch 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar import vector_search
from benchmarks.timing import take_turns
from benchmarks.vector_search.faiss_at_its_best import SyntheticDataset, faiss

Row = dict[str, str | float | bool]

NUM_VECTORS, DIM, K = 100_000, 128, 10
#: Least ratio of queries per second to FAISS's, by batch.
GATES = {1000: 0.9, 1: 1.5}
#: Number of timed calls, by batch.
_ROUNDS = {1000: 15, 1: 200}


def measure(of: str) -> list[Row]:
    """One row per method, of `"batch 1000"`."""
    batch = int(of.removeprefix("batch "))
    data = SyntheticDataset(DIM, 0, NUM_VECTORS, batch)
    corpus, queries = data.get_database(), data.get_queries()
    flat = faiss.IndexFlatL2(DIM)
    flat.add(corpus)
    index = vector_search.build(corpus, index="exact", batch=batch, progress=False)
    ways: dict[str, Callable[[], Any]] = {
        "FAISS Flat": lambda: flat.search(queries, K)[1],
        "autopar exact": lambda: index.search(queries, K).ids,
        "lax.top_k of all scores": naive(corpus, queries),
    }
    truth = ways["FAISS Flat"]()
    recall = {name: _recall(np.asarray(way()), truth) for name, way in ways.items()}
    times = take_turns({name: _timed(way) for name, way in ways.items()}, _ROUNDS[batch], warmup=2)
    best = {name: min(each) for name, each in times.items()}
    return [_row(name, batch, best, recall[name]) for name in ways]


def naive(corpus: Any, queries: Any) -> Callable[[], Any]:
    """A matmul, then `lax.top_k`."""

    @jax.jit
    def search(queries: jax.Array, corpus: jax.Array, squares: jax.Array) -> jax.Array:
        return lax.top_k(2 * queries @ corpus.T - squares, K)[1]

    vectors = jnp.asarray(corpus)
    squares = jnp.sum(vectors * vectors, axis=1)
    return lambda: np.asarray(search(queries, vectors, squares))


def _timed(way: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    return run


def _recall(found: Any, truth: Any) -> float:
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found, truth, strict=True)]))


def _row(name: str, batch: int, best: dict[str, float], recall: float) -> Row:
    ratio = best["FAISS Flat"] / best[name]
    return {
        "method": name,
        "vectors": NUM_VECTORS,
        "batch": batch,
        "k": K,
        "recall": recall,
        "best_ms": 1e3 * best[name],
        "queries_per_s": batch / best[name],
        "times_faiss": ratio,
        "gate": GATES[batch] if name == "autopar exact" else "",
        "met": "" if name != "autopar exact" else ratio >= GATES[batch],
    }
