"""Render the results: one table of measured values and their gates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.page_parts import Row, cell, descriptions

FOLDER = Path(__file__).parent


def summary(rows: Sequence[Row]) -> str:
    """How many gates are met, and what the parts measure."""
    gated = [row for row in rows if row["gate"]]
    met = sum(row["met"] is True for row in gated)
    return "\n\n".join([f"{met} of {len(gated)} gates are met.", *descriptions(FOLDER)])


def page_table(rows: Sequence[Row]) -> str:
    """All rows."""
    lines = [["part", "what", "value", "unit", "gate", "met"], ["---"] * 6]
    lines += [[cell(row[name]) for name in lines[0]] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
