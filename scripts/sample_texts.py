"""Print a random sample of the project's texts, to be read without other context: docstrings, errors, paragraphs.

`python scripts/sample_texts.py [--seed N] [--docstrings 40] [--errors 20] [--paragraphs 10]` prints the seed first, so that
the sample can be drawn again. A sentence that has to be read twice is rewritten.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autopar"
_LEAST_LETTERS = 60

#: Where a text is, and the text.
Found = tuple[str, str]


def docstrings() -> Iterator[Found]:
    """Docstrings of the package: modules, classes, functions."""
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = getattr(node, "name", "module")
                if text := ast.get_docstring(node):
                    yield f"{path}:{getattr(node, 'lineno', 1)} {name}", text


def errors() -> Iterator[Found]:
    """Texts of the errors that the package raises; a name in braces stands for a value."""
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = " ".join(_literal(part) for part in node.exc.args).strip()
                if len(text) > _LEAST_LETTERS:
                    yield f"{path}:{node.lineno}", text


def paragraphs() -> Iterator[Found]:
    """Paragraphs of the documentation and the README, without code, tables and headings."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for paragraph in re.split(r"\n\s*\n", text):
            if len(paragraph) > _LEAST_LETTERS and not paragraph.lstrip().startswith(("#", "|", "<", "!")):
                yield str(path.relative_to(ROOT)), paragraph.strip()


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return ""


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--docstrings", type=int, default=40)
    parser.add_argument("--errors", type=int, default=20)
    parser.add_argument("--paragraphs", type=int, default=10)
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}")
    chosen = random.Random(seed)
    for name, found, count in (
        ("docstring", docstrings(), options.docstrings),
        ("error", errors(), options.errors),
        ("paragraph", paragraphs(), options.paragraphs),
    ):
        texts = list(found)
        for number, (where, text) in enumerate(chosen.sample(texts, min(count, len(texts))), 1):
            print(f"\n--- {name} {number}: {where}\n{text}")


if __name__ == "__main__":
    main()
