"""Run the documentation's commands and programs, and insert their real output.

Usage, from the repository root: `.venv/bin/python scripts/refresh_docs.py [PAGE ...]`, after a change to a command's
output or to the planner; without a page, all pages with outputs. Then read the sentences around each change.

A page is its own template. A hidden comment marks the block or table after it as an output:

    <!-- output -->                             of the block above: the last command of a block of `sh`, or a block of
                                                Python, whose `title` is the file it belongs to
    <!-- output: COMMAND -->                    of a command that is not shown
    <!-- output | from A | to B | lines N -->   a part: from the first A to before the next B, at most N lines, then `…`
    <!-- output: COMMAND | fails -->            its final error, wrapped
    <!-- page: tutorial.md -->                  this page continues in that page's folder

Blocks with a title are appended to files of that name in an empty folder, and commands run there in order.
`tests/test_docs.py` does the same, and fails if a page shows outdated output.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 118
PICTURES = {"docs/collectives.md": "docs/images/all-reduce.png"}  # drawn by the page's own command, with `--plot`
DRAWN = {
    "docs/many-models.md": ("placement.svg", "docs/images/many-models.svg"),
    "docs/pipelines.md": ("step.svg", "docs/images/measured-pipeline.svg"),
}  # a file that a page's program writes
_FENCE = re.compile(r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)
_OUTPUT = re.compile(
    r"^<!-- output(?:: (?P<command>[^\n]*?))?(?P<options>(?: \| [^|\n]*?)*) -->\n+"
    r"(?:```\w*\n(?P<block>.*?)^```$|(?P<table>(?:\|[^\n]*\n)+))",
    re.M | re.S,
)
_MARK = "\f"  # separates the outputs of a file's blocks that are shown separately


class Shown(NamedTuple):
    """A place in a page that shows an output."""

    command: str  # empty for the output of the block above
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
    """Run a page's programs and commands in a folder; yields each output's place, and what was printed.

    Args:
        more: further environment variables.
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
    """The output of a command with this checkout's package on 8 virtual devices; if it fails, the final error,
    wrapped."""
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
    """A page's text with the new outputs."""
    page = path.read_text(encoding="utf-8")
    found = list(outputs(path, folder, {"XDG_CACHE_HOME": str(folder / "cache")}))  # no plan from an earlier run
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
            if name in DRAWN:
                file, picture = DRAWN[name]
                shutil.copyfile(Path(folder, file), ROOT / picture)
        print(f"refreshed {name}")


if __name__ == "__main__":
    main()
