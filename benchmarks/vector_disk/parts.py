"""Measure vector search on disk: pages, requests and bytes, which do not depend on the load of a shared machine.

There is one section per part. No query is in a corpus, and the builder does not see the queries.
"""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """The rows of one part, measured by the module of that name; text after a colon selects one of its programs."""
    name, _, of = program.partition(": ")
    module = importlib.import_module(f"benchmarks.vector_disk.{name}")
    return module.measure(of) if of else module.measure()
