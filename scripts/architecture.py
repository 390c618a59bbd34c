"""Write the tables of `docs/architecture.md`: packages from their docstrings, layers from `pyproject.toml`.

Usage, from the repository root: `.venv/bin/python scripts/architecture.py`, after a change to either.
`tests/test_docs.py` fails if the page differs from this script's output.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autopar"
PAGE = ROOT / "docs" / "architecture.md"
FIELDS = ("In", "Out", "Imported by")


def layers() -> list[str]:
    """The rows of the import contract, highest layer first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return next(c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "layers")


def packages() -> Iterator[Path]:
    """The folders of packages in reading order: each follows those that it imports, and its subpackages follow it."""
    for row in reversed(layers()):
        for name in row.split(" | "):
            if (PACKAGE / name).is_dir():
                yield from sorted(file.parent for file in (PACKAGE / name).rglob("__init__.py"))


def docstring(folder: Path) -> tuple[str, dict[str, str]]:
    """The headline and the fields of a package's docstring.

    Raises:
        ValueError: a field is missing.
    """
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    fields = dict(re.findall(r"^(\w[\w ]*): (.*)\.$", text, re.M))
    if missing := [name for name in FIELDS if name not in fields]:
        raise ValueError(f"the docstring of {folder.relative_to(ROOT)} has no line that begins with {missing[0]}:")
    return text.partition("\n")[0], fields


def table() -> str:
    rows = ["| package | what it is | in | out | imported by |", "|---|---|---|---|---|"]
    for folder in packages():
        headline, fields = docstring(folder)
        cells = (f"`{folder.relative_to(PACKAGE)}/`", headline, *(fields[name] for name in FIELDS))
        rows.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with updated tables."""
    for name, text in {"packages": table(), "layers": "```text\n" + "\n".join(layers()) + "\n```\n"}.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        head, _, rest = page.partition(begin)
        page = head + begin + text + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
