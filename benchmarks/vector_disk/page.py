"""Render the head of the results' page: each part's description, and its gates with their results."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def summary(rows: Sequence[Row]) -> str:
    """The docstrings of all modules of this folder that measure a part, and the gates that are not met."""
    parts = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        measures = any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body)
        if measures and path.stem != "parts":
            parts.append(f"**{path.stem}.** {ast.get_docstring(tree)}")
    missed = [f"{row['case']}, {row['figure']}: {row['measured']:.4g}" for row in rows if row["met"] is False]
    parts.append(f"Gates that are not met: {'; '.join(missed) or 'none'}.")
    return "\n\n".join(parts)
