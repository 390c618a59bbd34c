"""Check the project's words: refuse coined words in names, headlines and reports, and warn of them in prose.

`python scripts/check_words.py` fails if there are more of them than `MOST` allows; lower `MOST` as they go. It also
checks that the subjects of the latest commits are short.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Words that a reader of the field would not search for, and what to write.
COINED = {
    "awaited": "early reductions, overlap",
    "told": "what it is: prediction, report, options",
    "tell": "report, show, distinguish",
    "asked": "request, options",
    "asks": "request, needs",
    "joined": "fused, concatenated, reassociated",
    "rung": "level",
    "rungs": "levels",
    "ladder": "levels",
    "lane": "track, worker",
    "lanes": "tracks, workers",
    "hero": "root of a fusion",
    "twin": "copy, measured timeline",
    "twins": "copies, identical ones",
    "trips": "iterations, trip count",
    "strip": "halo slice",
    "strips": "halo slices",
    "maker": "producer",
    "makers": "producers",
    "alike": "identical, of the same sharding",
    "anew": "again",
    "beside": "next to, compared with",
    "held against": "compared with",
    "stands at the peak": "is live at the peak",
}
#: The number allowed, by kind; never raise it.
MOST = {"identifiers": 0, "headlines": 0, "reports": 0}
#: Packages in which every string is text for the user.
REPORTS = ("report", "cli")
MOST_LETTERS = 72
_COMMITS = 20
_WORDS = re.compile(rf"\b({'|'.join(map(re.escape, COINED))})\b", re.IGNORECASE)


def coined(text: str) -> list[str]:
    """Coined words in a text."""
    return [word.lower() for word in _WORDS.findall(text)]


def coined_in_name(name: str) -> list[str]:
    """Coined words in an identifier, in snake_case or CamelCase."""
    return coined(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", name))


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a module defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def findings(path: Path) -> Iterator[tuple[str, str, int, str]]:
    """Kind, text, line and coined word of each finding in a file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for name, line in defined_names(tree):
        for word in coined_in_name(name):
            yield "identifiers", name, line, word
    headline = (ast.get_docstring(tree) or "").partition("\n")[0]
    for word in coined(headline):
        yield "headlines", headline, 1, word
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_report = path.relative_to(ROOT / "autopar").parts[0] in REPORTS and id(node) not in docstrings
            for word in coined(node.value):
                yield "reports" if is_report else "prose", node.value[:80], node.lineno, word
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                for word in coined(token.string):
                    yield "prose", token.string[:80], token.start[0], word


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return ast.get_docstring(node, clean=False) is not None


def long_subjects() -> list[str]:
    """Subjects of the latest commits that are too long; none without a git history."""
    try:
        command = ["git", "log", f"-{_COMMITS}", "--no-merges", "--format=%s"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [subject for subject in done.stdout.splitlines() if len(subject) > MOST_LETTERS]


def main(argv: list[str]) -> int:
    """Print coined words, with `--all` also those in prose; exit code 1 if there are too many."""
    count: Counter[str] = Counter()
    for path in sorted((ROOT / "autopar").rglob("*.py")):
        for kind, text, line, word in findings(path):
            count[kind] += 1
            if "--all" in argv or (kind in MOST and count[kind] > MOST[kind]):
                print(f"{path.relative_to(ROOT)}:{line}: {word!r} ({COINED[word]}) in {kind}: {text!r}")
    for path in sorted((ROOT / "docs").rglob("*.md")):
        count["prose"] += len(coined(path.read_text(encoding="utf-8")))
    print(", ".join(f"{number} in {kind}" for kind, number in sorted(count.items())))
    subjects = long_subjects()
    for subject in subjects:
        print(f"a commit subject of {len(subject)} letters, above {MOST_LETTERS}: {subject}")
    return 1 if subjects or any(count[kind] > most for kind, most in MOST.items()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
