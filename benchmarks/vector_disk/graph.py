"""A graph on disk, 50,000 int8 vectors of 100 elements, 64 edges per node, for each of three random seeds.

Data and queries are those of `lists`. 500 queries are searched one by one, by the beam that the build chose for a recall
target of 0.95. In the order of ids, each page of the same graph has one node that is used: the same nodes, each in a page
of its own, searched with the beams around the recall of the packed graph, and interpolated. Used nodes are those whose
edges were followed. DiskANN builds with the same degree and bytes of codes, caches one node, and searches with the same
number of pages at a time; its pages are those of /proc/self/io. It runs if the environment variable `DISKANN_PYTHON` names
a Python that has `diskannpy`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph_on_disk.index import KIND
from autopar.vector_search.graph_on_disk.node_blocks import Nodes
from autopar.vector_search.on_disk.page_file import PageFileWriter, open_page_file
from benchmarks.vector_disk.lists import NUM_VECTORS, RECALL, K, data_of, nearest_of, read_bytes, recall_of, rows_of
from benchmarks.vector_search.contenders import at_recall

Row = dict[str, Any]

DEGREE, WIDTH = 64, 4
#: Nodes of a page that have to be used, and pages relative to the order of ids.
USED, OF_ID_ORDER = 3.0, 0.6
#: Beams of the order of ids, relative to that of the packed graph, and of DiskANN.
_BEAMS, _DISKANN_BEAMS = (0.75, 1, 1.5, 2, 3), (10, 14, 20, 28, 40, 56, 80)


def measure(of: str, num_vectors: int = NUM_VECTORS) -> list[Row]:
    """The rows of one data set and seed, as "synthetic, 21"."""
    name, seed = of.split(", ")
    corpus, queries = data_of(name, int(seed), num_vectors)
    nearest = nearest_of(corpus, queries)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed"
        with vector_search.build_graph_on_disk(corpus, path, degree=DEGREE, width=WIDTH, progress=False) as index:
            details = index.stats().details
            before = read_bytes()
            found, pages, requests, used = _searched(index, queries, None)
            on_device = (read_bytes() - before) / (4096 * pages * len(queries))
        share = recall_of(corpus, queries, nearest, found)
        _one_per_page(path, Path(folder) / "by_id")
        points: list[tuple[float, float]] = []
        with vector_search.load(Path(folder) / "by_id") as by_id:  # pyright: ignore[reportGeneralTypeIssues]
            assert isinstance(by_id, vector_search.GraphDiskIndex)
            for beam in _BEAMS:
                one, each, _, _ = _searched(by_id, queries, max(K, round(beam * details["effort"])))
                points.append((recall_of(corpus, queries, nearest, one), each))
        in_id_order = at_recall(points, share)
        theirs = at_recall(_diskann(corpus, queries, nearest, folder, details["code_bytes"]), share)
    case = f"graph, {name}, seed {seed}"
    missing = float("nan")
    figures: list[tuple[str, float, float | None, bool | None]] = [
        ("recall@10", share, RECALL, True),
        ("pages per query", pages, None, None),
        ("pages per query in the order of ids", in_id_order or missing, None, None),
        ("pages, of the order of ids", pages / in_id_order if in_id_order else missing, OF_ID_ORDER, False),
        ("nodes used per page", used, USED, True),
        ("requests per query", requests, None, None),
        ("bytes by /proc/self/io, of bytes counted", on_device, None, None),
        ("beam", details["effort"], None, None),
        ("file bytes per byte of vectors", details["file_bytes"] / corpus.nbytes, None, None),
        ("bytes in memory per vector", details["code_bytes"] + (4 * (corpus.shape[1] + DEGREE) + 4) / 100, None, None),
    ]
    if theirs:
        figures.append(("pages per query of DiskANN at this recall", theirs, None, None))
        figures.append(("pages, of DiskANN's", pages / theirs, 1.0, False))
    return rows_of(case, figures)


def _searched(
    index: vector_search.GraphDiskIndex, queries: np.ndarray, beam: int | None
) -> tuple[np.ndarray, float, float, float]:
    """Ids; pages and requests per query; nodes used per page."""
    before = index.reads()
    found = np.stack([index.search(query, K, effort=beam).ids for query in queries])
    after = index.reads()
    pages = after.pages - before.pages
    used = (after.used_bytes - before.used_bytes) / index.node_bytes / pages
    return found, pages / len(queries), (after.requests - before.requests) / len(queries), used


def _one_per_page(path: Path, target: Path) -> None:
    """Write the same graph with each node in a page of its own."""
    pages = open_page_file(path)
    with vector_search.load(path, reader="mmap") as index:  # pyright: ignore[reportGeneralTypeIssues]
        assert isinstance(index, vector_search.GraphDiskIndex)
        blocks = replace(index.graph.blocks, most=1)
        with PageFileWriter(target) as writer:
            for start in range(0, index.graph.num_blocks, 256):
                nodes = index.nodes(np.arange(start, min(start + 256, index.graph.num_blocks)))
                one = Nodes(*(part.reshape(-1, 1, *part.shape[2:]) for part in nodes))
                assert (one.positions >= NO_ID).all()
                writer.append(blocks.stream(one))
            writer.finish(KIND, {**pages.settings, "per_block": 1}, pages.arrays)


def _diskann(
    corpus: np.ndarray, queries: np.ndarray, nearest: np.ndarray, folder: str, code_bytes: int
) -> list[tuple[float, float]]:
    """Recall and pages per query of DiskANN with several beams; none if it is not installed."""
    python = os.environ.get("DISKANN_PYTHON")
    if not python:
        return []
    np.savez(Path(folder) / "data.npz", corpus=corpus, queries=queries)
    program = Path(__file__).parent / "diskann_rival.py"
    settings = {"degree": DEGREE, "width": WIDTH, "k": K, "code_bytes": code_bytes, "beams": _DISKANN_BEAMS}
    command = [python, str(program), folder, json.dumps(settings)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]})
    results = np.load(Path(folder) / "diskann.npz")
    return [
        (recall_of(corpus, queries, nearest, ids.astype(np.int64)), float(pages))
        for ids, pages in zip(results["ids"], results["pages"], strict=True)
    ]
