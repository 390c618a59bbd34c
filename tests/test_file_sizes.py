"""Files and classes of the package stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import autopar

MOST_LINES, MOST_CLASS_LINES = 500, 250
FOLDER = Path(autopar.__file__).parent
#: Classes that are yet to be split by concept, with what they may have until then: none may grow, none may be added.
STILL_LARGE = {
    "Checkpoints": 345,
    "Engine": 295,
    "ParallelStep": 327,
    "Replay": 298,
    "Scheduler": 315,
    "Search": 302,
    "_Classifier": 358,
    "_Rewriting": 339,
    "_Unstacking": 369,
}


def classes() -> Iterator[tuple[str, str, int]]:
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                yield str(path.relative_to(FOLDER)), node.name, node.end_lineno - node.lineno + 1


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.rglob("*.py")}
    assert not {str(path.relative_to(FOLDER)): count for path, count in lengths.items() if count > MOST_LINES}


def test_no_class_is_too_long() -> None:
    long = [one for one in classes() if one[2] > STILL_LARGE.get(one[1], MOST_CLASS_LINES)]
    assert not long


def test_what_has_been_split_may_not_grow_again() -> None:
    still = {name for _, name, count in classes() if count > MOST_CLASS_LINES}
    assert still == STILL_LARGE.keys()
