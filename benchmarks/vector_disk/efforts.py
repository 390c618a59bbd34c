"""Efforts that a recall needs, for `autopar estimate search` and `index="auto"`.

FAISS's synthetic set, int8 vectors of 100 elements, seed 21, in three sizes. 500 queries that are in no corpus are searched
with rising efforts, and the logarithm of the effort is interpolated at each recall@10. `growth` is the slope of the
logarithm of the effort at a recall of 0.95 against that of the number of vectors, of the two largest sizes: it falls. The rows at 50,000 vectors are the table
of `autopar/vector_search/estimate/efforts.py`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search
from autopar.vector_search.estimate.efforts import NUM_VECTORS, RECALLS
from benchmarks.vector_disk.lists import K, data_of, nearest_of, recall_of

Row = dict[str, Any]

SIZES = (3_125, 12_500, 50_000)
#: Efforts that are tried; bounds of expected neighbours per page, relative to that of the recall target.
EFFORTS, BOUNDS = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320), (16, 8, 4, 2, 1.4, 1, 0.7, 0.5, 0.25, 0.12)


def measure() -> list[Row]:
    """One row for each kind, size and recall."""
    rows: list[Row] = []
    found: dict[str, dict[int, list[float]]] = {}
    for num in SIZES:
        corpus, queries = data_of("synthetic", 21, num)
        nearest = nearest_of(corpus, queries)
        share = lambda ids, corpus=corpus, queries=queries, nearest=nearest: recall_of(corpus, queries, nearest, ids)  # noqa: E731
        for kind in ("ivf", "graph", "ivfdisk", "graphdisk"):
            with tempfile.TemporaryDirectory() as folder:
                path: dict[str, Any] = {"path": Path(folder) / "index"} if kind.endswith("disk") else {}
                index = vector_search.build(corpus, index=kind, mesh="1", **path)
                points = (
                    _lists_on_disk(index, queries, share) if kind == "ivfdisk" else _by_effort(index, queries, share)
                )
                found.setdefault(kind, {})[num] = [_at(points, recall) for recall in RECALLS]
                if path:
                    index.close()  # pyright: ignore[reportAttributeAccessIssue]
    for kind, sizes in found.items():
        for num, efforts in sizes.items():
            rows += [
                _row(f"{kind}, {num:,} vectors", f"effort at {r}", e) for r, e in zip(RECALLS, efforts, strict=True)
            ]
        middle = RECALLS.index(0.95)
        few, many = sorted(sizes)[-2:]
        slope = math.log(sizes[many][middle] / sizes[few][middle]) / math.log(many / few)
        rows.append(_row(kind, "growth", slope))
    assert NUM_VECTORS in SIZES
    return rows


def _by_effort(
    index: vector_search.Index, queries: np.ndarray, share: Callable[[np.ndarray], float]
) -> list[tuple[float, float]]:
    """Recall and effort."""
    return [(share(index.search(queries, K, effort=effort).ids), effort) for effort in EFFORTS]


def _lists_on_disk(
    index: vector_search.Index, queries: np.ndarray, share: Callable[[np.ndarray], float]
) -> list[tuple[float, float]]:
    """Recall and lists per query, by the learned choice of lists."""
    assert isinstance(index, vector_search.DiskIndex)
    lists = index.lists
    assert lists.rule is not None
    points = []
    for bound in BOUNDS:
        index.searches.lists = replace(lists, rule=replace(lists.rule, least=lists.rule.least * bound))
        probing = index.searches.probing(None, K, lists.num_vectors)
        parts = np.array_split(queries, 4)
        probed = np.mean([index.searches.probed(part, probing).sum(axis=1).mean() for part in parts])
        points.append((share(index.search(queries, K).ids), float(probed)))
    return points


def _at(points: Sequence[tuple[float, float]], recall: float) -> float:
    """The effort at a recall; NaN if none of the points reaches it."""
    ordered = sorted(points)
    if recall > ordered[-1][0]:
        return float("nan")
    missed = [math.log(max(1 - point[0], 1e-4)) for point in ordered]
    return math.exp(
        float(np.interp(-math.log(1 - recall), [-each for each in missed], np.log([p[1] for p in ordered])))
    )


def _row(case: str, figure: str, measured: float) -> Row:
    return {"case": case, "figure": figure, "measured": measured, "gate": "", "met": ""}
