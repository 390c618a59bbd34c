"""Read instances of the ASPLOS 2025 contest on intra-operator parallelism for distributed deep learning, as problems.

The files are not part of the repository. They are JSON, possibly gzipped: half-open intervals of nodes, a cost and a
memory usage for each strategy, row-major edge matrices. Parallel edges add up; a cost of 1e18 means forbidden.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from autopar.solve.problem import Edge, Problem, Usage
from benchmarks.machine import ROOT

FORBIDDEN = 1e18
FOLDER = Path(os.environ.get("AUTOPAR_IOPDDL", ROOT.parent / "shared" / "iopddl"))
#: The contest's time limits in seconds.
LIMITS_S = {"G": 60.0, "A": 60.0, "M": 180.0, "S": 240.0}


def instance(name: str, folder: Path = FOLDER) -> Path:
    """The file of an instance, by its letter or its full name.

    Raises:
        FileNotFoundError: the folder has no such file.
    """
    names = (f"{name}.json", f"{name}.json.gz", f"asplos-2025-iopddl-{name}.json.gz")
    for path in (folder / n for n in names):
        if path.exists():
            return path
    raise FileNotFoundError(f"no instance {name} in {folder}: set AUTOPAR_IOPDDL to the folder that has it")


def read(path: Path) -> Problem:
    """The problem in a file."""
    raw = path.read_bytes()
    return problem_of(json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["problem"])


def problem_of(given: dict[str, Any]) -> Problem:
    """The problem in a file's content; equal matrices become one array."""
    nodes, edges = given["nodes"], given["edges"]
    costs = tuple(map(_costs, nodes["costs"]))
    known: dict[tuple[int, tuple[float, ...]], np.ndarray] = {}

    def matrix(num_rows: int, entries: list[float]) -> np.ndarray:
        key = num_rows, tuple(entries)
        if key not in known:
            known[key] = _costs(entries).reshape(num_rows, -1)
        return known[key]

    sides = zip(edges["nodes"], edges["costs"], strict=True)
    held = enumerate(zip(nodes["intervals"], nodes["usages"], strict=True))
    limit = given.get("usage_limit")
    return Problem(
        costs,
        tuple(Edge(u, v, matrix(len(costs[u]), entries)) for (u, v), entries in sides),
        tuple(Usage(n, start, end, np.array(m, float)) for n, ((start, end), m) in held if any(m)),
        None if limit is None else float(limit),
    )


def _costs(entries: list[float]) -> np.ndarray:
    costs = np.array(entries, float)
    costs[costs >= FORBIDDEN] = np.inf
    return costs
