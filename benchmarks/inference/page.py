"""Render the head of the results' page, from each part's docstring and all gates, and the parts' tables."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.inference.rows import Row

_COLUMNS = ("what", "value", "unit", "gate", "met")


def summary(rows: Sequence[Row]) -> str:
    """Each part's description, and a table of all rows with a gate."""
    parts = []
    for part in dict.fromkeys(str(row["part"]) for row in rows):
        path = Path(__file__).parent / f"{part.replace(' ', '_')}.py"
        parts.append(f"**{part}.** {ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))}")
    gates = [row for row in rows if row["gate"] != ""]
    return "\n\n".join([*parts, _table(gates, ("part", *_COLUMNS))])


def page_table(rows: Sequence[Row]) -> str:
    """All columns but the part's name."""
    return _table(rows, _COLUMNS)


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = [columns, ["---"] * len(columns), *([_text(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
