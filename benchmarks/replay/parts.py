"""The replay of compiled programs, checked against measured tables, published runs, XLA's estimate and injected faults."""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """The rows of one part, by the module of its name."""
    return importlib.import_module(f"benchmarks.replay.{program}").rows()
