"""Building within a memory budget: 1,000,000 vectors of 32 float32 elements (128 MB) from a stream, with 64 MB.

The peak resident memory of the build, less that before it; a small build with the same programs comes first, so that
their compilation does not count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search

Row = dict[str, Any]

NUM_VECTORS, DIM, NUM_LISTS, BUDGET_BYTES = 1_000_000, 32, 500, 64_000_000
_CHUNK = 10_000


def measure(num_vectors: int = NUM_VECTORS) -> list[Row]:
    """One row for each figure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        _build(path, NUM_LISTS * 256)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        _build(path, num_vectors)
        growth = _status("VmHWM") - before
        size = path.stat().st_size
    case = f"{num_vectors:,} x {DIM} float32"
    return [
        {"case": case, "figure": figure, "measured": measured, "gate": gate, "met": met}
        for figure, measured, gate, met in (
            ("growth of resident memory, of the budget", growth / BUDGET_BYTES, 1.1, growth <= 1.1 * BUDGET_BYTES),
            ("bytes of the corpus, of the budget", 4 * num_vectors * DIM / BUDGET_BYTES, "", ""),
            ("file bytes per byte of vectors", size / (4 * num_vectors * DIM), "", ""),
        )
    ]


def _build(path: Path, num_vectors: int) -> None:
    def chunks() -> Iterator[np.ndarray]:
        directions = np.random.default_rng(0).normal(size=(10, DIM))
        for at in range(0, num_vectors, _CHUNK):
            draw = np.random.default_rng(1 + at)
            yield np.sin(draw.normal(size=(min(_CHUNK, num_vectors - at), 10)) @ directions).astype(np.float32)

    vector_search.build_on_disk(
        chunks, path, num_lists=NUM_LISTS, memory_budget_bytes=BUDGET_BYTES, progress=False, reader="mmap"
    ).close()


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))
