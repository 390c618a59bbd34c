"""Build and search with DiskANN, in a Python that has `diskannpy`: reads data.npz of a folder, writes diskann.npz.

Run by `graph.py` as `python diskann_rival.py FOLDER SETTINGS`. DiskANN reads with O_DIRECT, so `read_bytes` of
/proc/self/io counts its pages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import diskannpy  # pyright: ignore[reportMissingImports]
import numpy as np


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Write ids, `[num_beams, num_queries, k]`, and pages per query, `[num_beams]`."""
    data = np.load(folder / "data.npz")
    corpus, queries = data["corpus"], data["queries"]
    target = folder / "diskann"
    target.mkdir()
    diskannpy.build_disk_index(
        data=corpus,
        distance_metric="l2",
        index_directory=str(target),
        complexity=2 * settings["degree"],
        graph_degree=settings["degree"],
        search_memory_maximum=(settings["code_bytes"] + 0.5) * len(corpus) / 2**30,
        build_memory_maximum=4.0,
        num_threads=2,
        pq_disk_bytes=0,
    )
    index = diskannpy.StaticDiskIndex(
        index_directory=str(target), num_threads=4, num_nodes_to_cache=1, cache_mechanism=1
    )
    ids, pages = [], []
    for beam in settings["beams"]:
        before = _read_bytes()
        found = [index.search(query, settings["k"], beam, settings["width"]).identifiers for query in queries]
        pages.append((_read_bytes() - before) / 4096 / len(queries))
        ids.append(np.stack(found))
    np.savez(folder / "diskann.npz", ids=np.stack(ids), pages=np.array(pages))


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
