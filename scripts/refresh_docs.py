"""Run what the documentation shows, and put the real output into it.

Usage, from the repository root: `.venv/bin/python scripts/refresh_docs.py [PAGE ...]`, after a change to what a command
prints or to what the planner finds; without a page, all that have outputs. Then read the sentences around what changed.

A page is its own template. A comment, which readers do not see, stands before a block or a table that is an output:

    <!-- output -->                             of what stands above: the last command of a block of `sh`, or what a block
                                                of Python with a `title`, the file it belongs to, prints
    <!-- output: COMMAND -->                    of a command that is not shown
    <!-- output | from A | to B | lines N -->   a part: from the first A to before the next B, at most N lines, then `…`
    <!-- output: COMMAND | fails -->            the error that ends it, wrapped
    <!-- page: tutorial.md -->                  this page goes on in the folder where that one's programs have run

Blocks with a title are written into files of an empty folder, those of one title one after the other, and commands run
there in order. `tests/test_docs.py` runs the same, and fails where a page shows what is no longer printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 118
PICTURES = {"docs/collectives.md": "docs/images/all-reduce.png"}  # drawn by the page's own command
_FENCE = re.compile(r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)
_OUTPUT = re.compile(
    r"^<!-- output(?:: (?P<command>[^\n]*?))?(?P<options>(?: \| [^|\n]*?)*) -->\n+"
    r"(?:```\w*\n(?P<block>.*?)^```$|(?P<table>(?:\|[^\n]*\n)+))",
    re.M | re.S,
)
_MARK = "\f"  # printed after each block of a file whose blocks' outputs are shown one by one


class Shown(NamedTuple):
    """A place in a page where an output stands."""

    command: str  # empty: what the block above prints
    options: dict[str, str]
    text: str
    start: int
    end: int


def shown(page: str) -> list[Shown]:
    """The outputs in a page's text, in order."""
    found = []
    for match in _OUTPUT.finditer(page):
        group = "table" if match["block"] is None else "block"
        options = [option.strip().partition(" ") for option in match["options"].split(" | ")[1:]]
        as_dict = {name: value for name, _, value in options}
        found.append(Shown(match["command"] or "", as_dict, match[group], match.start(group), match.end(group)))
    return found


def outputs(path: Path, folder: Path, more: Mapping[str, str] | None = None) -> Iterator[tuple[Shown, str]]:
    """Run a page's programs and commands in a folder; for each output, where it stands and what was printed.

    Args:
        more: environment variables on top of the usual ones.
    """
    page = path.read_text(encoding="utf-8")
    before = re.search(r"^<!-- page: (\S+) -->$", page, re.M)
    if before and not any(folder.iterdir()):
        list(outputs(path.parent / before[1], folder, more))
    places = shown(page)
    blocks = list(_FENCE.finditer(page))
    one_by_one = {_above(blocks, place)["title"] for place in places if not place.command} - {None}
    _write_files(blocks, one_by_one, folder)
    ran: dict[str, str] = {}
    for place in places:
        part = None
        if place.command:
            command = place.command
        elif (above := _above(blocks, place))["language"] == "sh":
            *first, command = above["text"].splitlines()
            for line in first:
                run(line, folder, more)
        else:
            command = f"python {above['title']}"
            part = [block.start() for block in blocks if block["title"] == above["title"]].index(above.start())
        if command not in ran:
            ran[command] = run(command, folder, more, fails="fails" in place.options)
        yield place, _cut(ran[command] if part is None else ran[command].split(_MARK)[part], place.options)


def _above(blocks: list[re.Match[str]], place: Shown) -> re.Match[str]:
    return [block for block in blocks if block.end() < place.start][-1]


def _write_files(blocks: list[re.Match[str]], one_by_one: set[str | None], folder: Path) -> None:
    texts: dict[str, str] = {}
    for block in blocks:
        if block["title"]:
            mark = f"print(end={_MARK!r}, flush=True)\n" if block["title"] in one_by_one else ""
            texts[block["title"]] = texts.get(block["title"], "") + f"{block['text']}\n{mark}"
    for title, text in texts.items():
        (folder / title).write_text(text, encoding="utf-8")


def run(command: str, folder: Path, more: Mapping[str, str] | None = None, *, fails: bool = False) -> str:
    """What a command prints, of this checkout's package, on 8 virtual devices; where it fails, the error that ends it, wrapped."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = re.sub(r"^autopar ", "python -m autopar ", command)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env | dict(more or {}), capture_output=True, text=True, timeout=600
    )
    assert (done.returncode != 0) == fails, f"`{command}` exits with {done.returncode}:\n{done.stderr[-3000:]}"
    if fails:
        error = re.split(r"\n(?=autopar\.errors\.)", done.stderr.strip())[-1].replace(str(folder), "/home/me")
        return "\n".join(textwrap.fill(line, WIDTH) for line in error.splitlines())
    return done.stdout


def _cut(printed: str, options: Mapping[str, str]) -> str:
    start = printed.index(options["from"]) if "from" in options else 0
    end = printed.index(options["to"], start) if "to" in options else None
    lines = printed[start:end].strip("\n").splitlines()
    most = int(options.get("lines", len(lines)))
    return "\n".join([*lines[:most], "…"] if len(lines) > most else lines) + "\n"


def refreshed(path: Path, folder: Path) -> str:
    """A page's text with the outputs that were printed."""
    page = path.read_text(encoding="utf-8")
    found = list(outputs(path, folder, {"XDG_CACHE_HOME": str(folder / "cache")}))  # no plan of an earlier run
    for place, printed in reversed(found):
        page = page[: place.start] + printed + page[place.end :]
    return page


def main() -> None:
    named = [Path(name).resolve() for name in sys.argv[1:]]
    for path in named or sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        if not shown(path.read_text(encoding="utf-8")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(refreshed(path, Path(folder)), encoding="utf-8")
            name = str(path.relative_to(ROOT))
            if name in PICTURES:
                block = next(b for b in _FENCE.finditer(path.read_text(encoding="utf-8")) if b["language"] == "sh")
                run(f"{block['text'].strip()} --plot {ROOT / PICTURES[name]}", Path(folder))
        print(f"refreshed {name}")


if __name__ == "__main__":
    main()
