"""The engine of `autopar.inference`: steps, pages, prompts in chunks, proposals, starts, devices; and beside `transformers`.

All but the last of small models with random weights on a CPU. What is timed is timed in turns, in one process or in two of
which one waits, and ratios count; seconds tell of this machine on that day. None of it was measured on a GPU.
"""

from __future__ import annotations

import importlib

from benchmarks.inference.rows import Row


def measure(program: str) -> list[Row]:
    """The rows of one part: the module of that name measures it."""
    module = importlib.import_module(f"benchmarks.inference.{program.replace(' ', '_')}")
    return [{"part": program, **row} for row in module.measure()]
