"""Render the head of the results' page, from each part's docstring.

This file is no source of any part, so a change to it makes no measurement outdated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.page_parts import Row, descriptions


def summary(rows: Sequence[Row]) -> str:
    """The docstrings of all modules of this folder that measure a part."""
    return "\n\n".join(descriptions(Path(__file__).parent))
