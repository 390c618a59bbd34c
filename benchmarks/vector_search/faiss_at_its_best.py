"""Configure FAISS for its best speed.

Import this module before anything else loads FAISS.
"""

from __future__ import annotations

import os
from pathlib import Path

_CPU = Path("/proc/cpuinfo")

if "OPENBLAS_CORETYPE" not in os.environ and _CPU.exists() and " avx512f" in _CPU.read_text():
    os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"

import faiss as faiss
from faiss.contrib.datasets import SyntheticDataset as SyntheticDataset

faiss.omp_set_num_threads(os.cpu_count() or 1)
