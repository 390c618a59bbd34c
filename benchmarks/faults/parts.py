"""Measure training that survives failures. There is one section per part."""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """The rows of one part, measured by the module of that name; text after a colon selects one of its programs."""
    name, _, of = program.partition(": ")
    module = importlib.import_module(f"benchmarks.faults.{name}")
    return module.measure(of) if of else module.measure()
