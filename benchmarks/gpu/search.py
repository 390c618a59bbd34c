"""Measure vector search on one GPU: queries per second by batch, recall, build time; baseline: cuVS, if installed.

In: the kind of index. Out: a record with rows. The vectors are FAISS's synthetic set: 128 dims, 10 of them intrinsic.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar import vector_search
from benchmarks.gpu.setting import Record, Setting
from benchmarks.synthetic_vectors import faiss_synthetic
from benchmarks.timing import median_s

_DIM, _K = 128, 10
#: Kind of index -> number of vectors, and cuVS's name for it.
_KINDS = {"exact": (1_000_000, "brute_force"), "ivf": (1_000_000, "ivf_flat"), "graph": (200_000, "cagra")}
_BATCHES = (1, 10, 100, 1000, 10_000)
_TINY_VECTORS, _TINY_BATCHES = 2000, (1, 20)
#: Number of queries whose true neighbours are computed, for the recall.
_JUDGED = 1000
#: Number of timed calls per batch.
_CALLS = 10


def search(kind: str, setting: Setting) -> Record:
    """Measure one of `_KINDS`."""
    num = _TINY_VECTORS if setting.is_tiny else _KINDS[kind][0]
    batches = _TINY_BATCHES if setting.is_tiny else _BATCHES
    data = faiss_synthetic(_DIM, 0, num, max(batches[-1], 100 if setting.is_tiny else _JUDGED))
    judged = data.queries[: 100 if setting.is_tiny else _JUDGED]
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("corpus",))
    truth = vector_search.build(data.corpus, index="exact", mesh=mesh, progress=False).search(judged, k=_K).ids
    began = time.perf_counter()
    index = vector_search.build(data.corpus, index=kind, mesh=mesh, progress=False, recall_target=0.95)
    record: Record = {"vectors": num, "dim": _DIM, "k": _K, "build_s": time.perf_counter() - began}
    record["recall"] = _recall(index.search(judged, k=_K).ids, truth)
    record["rows"] = _by_batch(lambda queries: index.search(queries, k=_K).ids, data.queries, batches)
    return record | {"cuvs": _cuvs(_KINDS[kind][1], data, judged, truth, batches)}


def _by_batch(run: Callable[[Any], Any], queries: Any, batches: tuple[int, ...]) -> list[Record]:
    rows: list[Record] = []
    for batch in batches:
        seconds = median_s(lambda some=queries[:batch]: np.asarray(run(some)), _CALLS)
        rows.append({"batch": batch, "seconds": seconds, "queries_per_s": batch / seconds})
    return rows


def _recall(found: Any, truth: Any) -> float:
    pairs = zip(np.asarray(found), np.asarray(truth), strict=True)
    return float(np.mean([len(set(a.tolist()) & set(b.tolist())) / _K for a, b in pairs]))


def _cuvs(name: str, data: Any, judged: Any, truth: Any, batches: tuple[int, ...]) -> Record | None:
    """The same by NVIDIA's library with its default settings; None if it is not installed."""
    try:
        cupy: Any = importlib.import_module("cupy")
        kind: Any = importlib.import_module(f"cuvs.neighbors.{name}")
    except ImportError:
        return None
    corpus = cupy.asarray(data.corpus)
    began = time.perf_counter()
    params = () if name == "brute_force" else (kind.IndexParams(),)
    index = kind.build(*params, corpus)
    cupy.cuda.Device().synchronize()
    built_s = time.perf_counter() - began
    given = () if name == "brute_force" else (kind.SearchParams(),)

    def run(queries: Any) -> Any:
        return cupy.asnumpy(kind.search(*given, index, cupy.asarray(queries), _K)[1])

    rows = _by_batch(run, data.queries, batches)
    return {"build_s": built_s, "recall": _recall(run(judged), truth), "rows": rows}
