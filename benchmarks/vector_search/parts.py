"""Vector search beside FAISS, in one process, on the same data, taking turns.

Exact searches are of FAISS's own synthetic set: 128 elements, of 10 intrinsic dims. The others are of that, of clusters of
which the first is two hundred times as large as the last, and of the documentation on this machine, hashed TF-IDF and
an SVD; queries are none of the vectors. Every method searches with all cores; of its times the best counts, for on a shared
machine the others tell of the neighbours. A neighbour counts as found where another is equally near. FAISS multiplies
with the OpenBLAS that its wheel carries, which on CPUs newer than itself falls back to code for the oldest ones: it is
told to use AVX-512 where there is any, so that it is FAISS at its best that is compared with. hnswlib, usearch and
ScaNN are measured where they are installed (the extra `bench-search`). Where no setting finds the recall that a gate is
held at, it stands at the one that finds most, as not met.
"""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """The rows of one part: the module of that name measures what stands behind the colon."""
    name, _, of = program.partition(": ")
    return importlib.import_module(f"benchmarks.vector_search.{name}").measure(of)
