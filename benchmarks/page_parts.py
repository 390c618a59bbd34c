"""Write what the pages of several benchmarks have in common: the descriptions of their parts, cells of tables, and plots.

This file is no source of any part, so a change to it makes no measurement outdated.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def descriptions(folder: Path) -> list[str]:
    """The docstrings of all modules of a folder that measure a part, each after the part's name."""
    parts: list[str] = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        measures = any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body)
        if measures and path.stem != "parts":
            parts.append(f"**{path.stem}.** {ast.get_docstring(tree)}")
    return parts


def cell(value: Any) -> str:
    """A value as a cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plot(points: Sequence[Row], path: Path, draw: Callable[[Sequence[Row], Path], None]) -> None:
    """Draw points, if there are any; without matplotlib, print a note on standard error."""
    if not points:
        return
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path.name} is not drawn: matplotlib is missing (the extra `plot`)", file=sys.stderr)
        return
    draw(points, path)
