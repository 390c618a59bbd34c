"""Measure the engine of `autopar.inference`, part by part; the last part compares it with `transformers`.

All parts but the last use small models with random weights on a CPU. Contenders take turns; if they are two processes,
one waits. Ratios count, because seconds depend on this machine's load. None of this was measured on a GPU.
"""

from __future__ import annotations

import importlib

from benchmarks.inference.rows import Row


def measure(program: str) -> list[Row]:
    """The rows of one part, measured by the module of that name."""
    module = importlib.import_module(f"benchmarks.inference.{program.replace(' ', '_')}")
    return [{"part": program, **row} for row in module.measure()]
