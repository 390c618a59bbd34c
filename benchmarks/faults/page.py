"""Render the head of the results' page, from each part's docstring.

This file is no source of any part, so a change to it makes no measurement outdated.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any


def summary(rows: list[dict[str, Any]]) -> str:
    """The docstrings of all modules of this folder that measure a part."""
    parts = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        measures = any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body)
        if measures and path.stem != "parts":
            parts.append(f"**{path.stem}.** {ast.get_docstring(tree)}")
    return "\n\n".join(parts)
