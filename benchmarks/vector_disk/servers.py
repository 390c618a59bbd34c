"""Four server processes with two replicas of 50,000 int8 vectors of 100 elements (FAISS's synthetic set, seed 21).

`autopar serve --index` serves each part, and a router in this process searches for 500 queries, in batches of 50. Lists are
placed by the load of 2,000 queries that were drawn from these by Zipf's law with exponent 1. Results are compared with those of the whole index in this process; equally near
vectors may be in any order. Then one server gets SIGKILL, and the queries are repeated; each of the servers in turn. The
load is that of 5,000 further queries of that law: lists that each server was sent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search
from benchmarks.vector_disk.lists import DIM, NUM_VECTORS, K, data_of, nearest_of, recall_of, squared_distances

Row = dict[str, Any]

NUM_SERVERS, REPLICAS, TRACE, BATCH = 4, 2, 2_000, 50
#: Longer than a server may take to compile its programs on a busy machine: a server that is late counts as lost, and the
#: others get its load. A killed one refuses connections at once.
_DEADLINE_S = 900.0


def measure(num_vectors: int = NUM_VECTORS) -> list[Row]:
    """One row for each figure."""
    corpus, queries = data_of("synthetic", 21, num_vectors)
    draw, share = np.random.default_rng(0), 1 / np.arange(1, len(queries) + 1)
    drawn = lambda num: queries[draw.choice(len(queries), num, p=share / share.sum())]  # noqa: E731
    nearest = nearest_of(corpus, queries)
    with tempfile.TemporaryDirectory() as folder:
        index = vector_search.build_on_disk(corpus, Path(folder) / "index", recall_target=0.95, progress=False)
        parts = vector_search.divide(index, folder, NUM_SERVERS, replicas=REPLICAS, queries=drawn(TRACE))
        whole = index.search(queries, K)
        processes = [_started(part) for part in parts]
        try:
            urls = [url for _, url in processes]
            with vector_search.ServedIndex(parts[0], urls, deadline_s=_DEADLINE_S, retry_s=3600) as router:
                found, requested, _ = _searched(router, queries)
                before = router.loads
                _searched(router, drawn(5_000))
                loads = router.loads - before
            lost = []
            for which, (process, _) in enumerate(processes):
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                with vector_search.ServedIndex(parts[0], urls, deadline_s=_DEADLINE_S, retry_s=3600) as router:
                    ids, _, coverage = _searched(router, queries)
                lost.append((recall_of(corpus, queries, nearest, ids), float(coverage.min())))
                processes[which] = _started(parts[which], int(urls[which].rsplit(":", 1)[1]))
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
        sizes = sum(part.stat().st_size for part in parts) / index.path.stat().st_size
        index.close()
    differing = int((squared_distances(corpus, queries, found) != squared_distances(corpus, queries, whole.ids)).sum())
    figures: list[tuple[str, float, float | str, bool | str]] = [
        ("results that differ from one process", differing, 0, differing == 0),
        ("servers per query, of 4", float(requested.mean()), 2, bool(requested.mean() <= 2)),
        ("recall@10", recall_of(corpus, queries, nearest, found), "", ""),
        (
            "recall@10 without one server, lowest",
            min(each for each, _ in lost),
            0.95,
            min(each for each, _ in lost) >= 0.95,
        ),
        ("coverage without one server, lowest", min(each for _, each in lost), "", ""),
        (
            "load of the busiest server, of the mean",
            float(loads.max() / loads.mean()),
            1.15,
            bool(loads.max() <= 1.15 * loads.mean()),
        ),
        ("bytes of all parts, of the index", sizes, "", ""),
    ]
    case = f"{num_vectors:,} x {DIM} int8"
    return [{"case": case, "figure": a, "measured": b, "gate": c, "met": d} for a, b, c, d in figures]


def _searched(router: vector_search.ServedIndex, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parts = [router.search(queries[at : at + BATCH], K) for at in range(0, len(queries), BATCH)]
    return tuple(np.concatenate(each) for each in zip(*((p.ids, p.requested, p.coverage) for p in parts), strict=True))  # pyright: ignore[reportReturnType]


def _started(part: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """A server of a part, and its address."""
    command = [sys.executable, "-m", "autopar", "serve", "--index", str(part), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    return process, line.split(": ", 1)[1].strip().removesuffix("/search")
