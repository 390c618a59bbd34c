"""Measure vector search against FAISS: in one process, on the same data, in turns.

Exact searches use FAISS's own synthetic set: 128 dims, 10 of them intrinsic. The others use that set, clusters of which
the first is two hundred times as large as the last, and the documentation on this machine, as hashed TF-IDF with an
SVD; no query is in the corpus. Every method uses all cores. The minimum of its times counts, because the others depend
on the load of a shared machine. A neighbour counts as found if an equally near vector is returned. FAISS's wheel
carries an OpenBLAS that falls back to code for the oldest CPUs if the CPU is newer than itself; it is set to use
AVX-512 if there is any, so that FAISS runs at its best. hnswlib, usearch and ScaNN are measured if they are installed
(the extra `bench-search`). If no setting reaches a gate's recall, the gate fails, and the setting with the highest
recall is shown.
"""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """The rows of one part: the module before the colon measures the data set or batch after it."""
    name, _, of = program.partition(": ")
    return importlib.import_module(f"benchmarks.vector_search.{name}").measure(of)
