"""Build with hnswlib, in a Python that has it, and print the CPU seconds: `python hnswlib_rival.py VECTORS NUM`."""

from __future__ import annotations

import sys
import time

import hnswlib  # pyright: ignore[reportMissingImports]
import numpy as np

vectors = np.load(sys.argv[1], mmap_mode="r")[: int(sys.argv[2])]
index = hnswlib.Index("l2", vectors.shape[1])
index.init_index(len(vectors), M=16, ef_construction=200)
index.set_num_threads(2)
start = time.process_time()
index.add_items(vectors)
print(time.process_time() - start)
