"""CPU seconds of building a graph in memory, of hnswlib's (M = 16, ef_construction = 200, its default), both on two threads.

FAISS's synthetic set, float32 vectors of 128 elements, seed 7. `autopar.vector_search.build(index="graph")` includes the
measurement of its recall. The first build of a process compiles its programs; the second has them. hnswlib builds before
and after, and the mean counts: CPU seconds grow if others use the same cores. It runs if the environment variable
`HNSWLIB_PYTHON` names a Python that has `hnswlib`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search
from benchmarks.synthetic_vectors import faiss_synthetic

Row = dict[str, Any]

#: Numbers of vectors, and builds of each.
SIZES = {20_000: 2, 100_000: 1}
DIM, GATE = 128, 3.0


def measure() -> list[Row]:
    """Ours of hnswlib's, for each size and build."""
    corpus = faiss_synthetic(DIM, 0, max(SIZES), 10, 7).corpus.astype(np.float32)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.npy"
        np.save(path, corpus)
        for num, builds in SIZES.items():
            before, own, details = _hnswlib(path, num), [], {}
            for _ in range(builds):
                start = time.process_time()
                index = vector_search.build(corpus[:num], index="graph", mesh="1", progress=False)
                own.append(time.process_time() - start)
                details = index.stats().details
            theirs = (before + _hnswlib(path, num)) / 2
            case = f"{num:,} vectors"
            rows += [_row(case, "recall@10 of the sample", details["recall"]), _row(case, "beam", details["effort"])]
            for which, seconds in zip(("first", "second"), own, strict=False):
                rows.append(_row(case, f"CPU seconds, {which} build", seconds))
                rows.append(_row(case, f"CPU seconds of hnswlib's, {which} build", seconds / theirs, GATE))
    return rows


def _hnswlib(path: Path, num: int) -> float:
    python = os.environ.get("HNSWLIB_PYTHON")
    if not python:
        return float("nan")
    command = [python, str(Path(__file__).parent / "hnswlib_rival.py"), str(path), str(num)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _row(case: str, figure: str, measured: float, gate: float | None = None) -> Row:
    met = "" if gate is None or np.isnan(measured) else bool(measured <= gate)
    return {"case": case, "figure": figure, "measured": measured, "gate": "" if gate is None else gate, "met": met}
