"""Render the head of the results' page: each part's description, and its gates with their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.page_parts import Row, descriptions


def summary(rows: Sequence[Row]) -> str:
    """The docstrings of all modules of this folder that measure a part, and the gates that are not met."""
    parts = descriptions(Path(__file__).parent)
    missed = [f"{row['case']}, {row['figure']}: {row['measured']:.4g}" for row in rows if row["met"] is False]
    parts.append(f"Gates that are not met: {'; '.join(missed) or 'none'}.")
    return "\n\n".join(parts)
