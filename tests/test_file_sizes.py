"""Files and classes of the package stay short enough to read at once."""

from __future__ import annotations

import ast
from pathlib import Path

import autopar

MOST_LINES, MOST_CLASS_LINES = 500, 250
FOLDER = Path(autopar.__file__).parent
TEXTS = {str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py")}


def test_no_file_is_too_long() -> None:
    lengths = {path: len(text.splitlines()) for path, text in TEXTS.items()}
    assert not {path: count for path, count in lengths.items() if count > MOST_LINES}


def test_no_class_is_too_long() -> None:
    lengths: dict[str, int] = {}
    for path, text in TEXTS.items():
        for node in ast.walk(ast.parse(text)) if text.count("\n") > MOST_CLASS_LINES else ():
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lengths[f"{path} {node.name}"] = node.end_lineno - node.lineno + 1
    assert not {name: count for name, count in lengths.items() if count > MOST_CLASS_LINES}
