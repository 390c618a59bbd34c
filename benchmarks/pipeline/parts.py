"""Pipelines: plans over several submeshes. One section for each part."""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """The rows of one part: the module of that name measures it; of several programs, the one behind a colon."""
    name, _, of = program.partition(": ")
    module = importlib.import_module(f"benchmarks.pipeline.{name}")
    return module.measure(of) if of else module.measure()
