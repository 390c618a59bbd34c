"""Building within a memory budget, from a stream.

Lists: 1,000,000 vectors of 32 float32 elements (128 MB), with 64 MB. A graph: 350,000 vectors of 128 float32 elements (179
MB), with 160 MB, 32 edges per node and codes of 32 bytes. The peak resident memory of the build, less that before it; a small
build with the same programs comes first, so that their compilation does not count. The graphs of shards have a few sizes, and
programs of sizes that the small build lacks do count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search

Row = dict[str, Any]

NUM_VECTORS, DIM, NUM_LISTS, BUDGET_BYTES = 1_000_000, 32, 500, 64_000_000
#: Of the graph.
GRAPH_VECTORS, GRAPH_DIM, DEGREE, CODE_BYTES, GRAPH_BUDGET_BYTES = 350_000, 128, 32, 32, 160_000_000
_CHUNK = 10_000


def measure(of: str = "lists") -> list[Row]:
    """One row for each figure, of `lists` or `graph`."""
    if of == "graph":
        return _measured(_graph, GRAPH_VECTORS // 5, GRAPH_VECTORS, GRAPH_DIM, GRAPH_BUDGET_BYTES, "graph of ")
    return _measured(_lists, NUM_LISTS * 256, NUM_VECTORS, DIM, BUDGET_BYTES)


def _measured(
    build: Callable[[Path, int], None], few: int, num_vectors: int, dim: int, budget_bytes: int, what: str = ""
) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        build(path, few)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        build(path, num_vectors)
        growth = _status("VmHWM") - before
        size = path.stat().st_size
    case = f"{what}{num_vectors:,} x {dim} float32"
    return [
        {"case": case, "figure": figure, "measured": measured, "gate": gate, "met": met}
        for figure, measured, gate, met in (
            ("growth of resident memory, of the budget", growth / budget_bytes, 1.1, growth <= 1.1 * budget_bytes),
            ("bytes of the corpus, of the budget", 4 * num_vectors * dim / budget_bytes, "", ""),
            ("file bytes per byte of vectors", size / (4 * num_vectors * dim), "", ""),
        )
    ]


def _lists(path: Path, num_vectors: int) -> None:
    vector_search.build_on_disk(
        lambda: _chunks(num_vectors, DIM),
        path,
        num_lists=NUM_LISTS,
        memory_budget_bytes=BUDGET_BYTES,
        progress=False,
        reader="mmap",
    ).close()


def _graph(path: Path, num_vectors: int) -> None:
    vector_search.build_graph_on_disk(
        lambda: _chunks(num_vectors, GRAPH_DIM),
        path,
        degree=DEGREE,
        code_bytes=CODE_BYTES,
        memory_budget_bytes=GRAPH_BUDGET_BYTES,
        progress=False,
        reader="mmap",
    ).close()


def _chunks(num_vectors: int, dim: int) -> Iterator[np.ndarray]:
    directions = np.random.default_rng(0).normal(size=(10, dim))
    for at in range(0, num_vectors, _CHUNK):
        draw = np.random.default_rng(1 + at)
        yield np.sin(draw.normal(size=(min(_CHUNK, num_vectors - at), 10)) @ directions).astype(np.float32)


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))
