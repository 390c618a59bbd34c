"""The documentation says what is so: its programs run, its links lead somewhere, nothing public is left out."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import autopar
from autopar import errors

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str  # the file it belongs to
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*match.groups(default="")) for match in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def run(command: list[str], folder: Path) -> str:
    """Run in a process of its own, as a user would, with this checkout's package and 8 virtual devices."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
    }
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{shlex.join(command)} failed:\n{done.stderr[-3000:]}"
    return done.stdout


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- programs --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """Its Python blocks make up the files they name; `train.py` is run, then the commands. Its last plan is the one
    that the guide to the report is about."""
    found = blocks(DOCS / "tutorial.md")
    for block in found:
        if block.language == "python":
            assert block.title, "every Python block of the tutorial says which file it belongs to"
            mark = "print(end='\\f')\n" if block.title == "train.py" else ""
            with (tmp_path / block.title).open("a", encoding="utf-8") as file:
                file.write(block.text + "\n" + mark)
    printed = run([sys.executable, "train.py"], tmp_path).split("\f")
    outputs: dict[str, str] = {}
    for block, following in pairwise(found):
        if block.title == "train.py":
            output = printed.pop(0)
            if following.language == "text":
                check_shown(following.text, output, numbers=False)
        if block.language == "sh":
            outputs |= {line: autopar_command(line, tmp_path) for line in block.text.splitlines()}
            check_shown(following.text, [*outputs.values()][-1], numbers=False)
    for block in blocks(DOCS / "reading-a-plan.md"):
        check_shown(block.text, outputs["autopar explain large.plan.json"], numbers=False)


def autopar_command(line: str, folder: Path) -> str:
    program, *arguments = shlex.split(line)
    assert program == "autopar", f"only the command line is tried here, not {program}"
    return run([sys.executable, "-m", "autopar", *arguments], folder)


def test_the_example_in_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    found = blocks(ROOT / "README.md")
    (tmp_path / "example.py").write_text(next(b.text for b in found if b.language == "python"), encoding="utf-8")
    shown = next(block.text for block in found if block.language == "text")
    check_shown(shown, run([sys.executable, "example.py"], tmp_path), numbers=True)


def check_shown(shown: str, printed: str, *, numbers: bool) -> None:
    """Assert that the parts of `shown` between lines of `…` were printed, under the JAX that the README names.

    Times of the solver are passed over, and without `numbers` all numbers and the lengths of bars are.
    """
    version = re.search(r"JAX (\d[\d.]*\d)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert version, "the README says with which JAX its output was made"
    if version[1] != jax.__version__:
        return
    for part in shown.split("…\n"):
        assert _plain(part, numbers) in _plain(printed, numbers), f"shown:\n{part}\nprinted:\n{printed}"


def _plain(text: str, numbers: bool) -> str:
    text = re.sub(r"/\S*/(?=\w+\.py:\d)", "", text)  # the folder it is run in
    text = re.sub(r"solved\s+in\s+[\d.]+\s+\w+\)", "solved)", text)
    if not numbers:
        text = re.sub(r"#+", "", text)
        text = re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "0", text)
        text = re.sub(r"\b0( ([KMG]?B|[nmu]?s))?\b", "0", text)
    return re.sub(r"-{3,}", "---", re.sub(r"\s+", " ", text)).strip()


def test_the_table_of_all_reduces_is_what_is_printed(tmp_path: Path) -> None:
    found = blocks(DOCS / "collectives.md")
    command, shown = (next(b.text for b in found if b.language == language) for language in ("sh", "text"))
    assert autopar_command(command.strip(), tmp_path) == shown


def test_the_search_on_paper_is_what_is_printed(tmp_path: Path) -> None:
    command, shown = blocks(DOCS / "vector-search-on-paper.md")
    check_shown(shown.text, autopar_command(f"{command.text.strip()} --no-cache", tmp_path), numbers=True)


@pytest.mark.slow
def test_the_page_on_checkpoints_prints_what_it_shows(tmp_path: Path) -> None:
    """Its program is run on 8 devices, then on 4; then the two plans are compared."""
    found = blocks(DOCS / "checkpoints.md")
    for block in found:
        if block.language == "python" and block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    for command, shown in pairwise(found):
        if command.language != "sh":
            continue
        program, *arguments = shlex.split(command.text)
        if program == "python":
            check_shown(shown.text, run([sys.executable, *arguments], tmp_path), numbers=False)
        else:
            check_shown(shown.text, autopar_command(command.text, tmp_path), numbers=False)


def test_the_rule_in_the_guide_prints_what_it_shows(tmp_path: Path) -> None:
    program, shown = (block.text for block in blocks(DOCS / "add-a-primitive.md"))
    (tmp_path / "rule.py").write_text(program, encoding="utf-8")
    assert run([sys.executable, "rule.py"], tmp_path) == shown


@pytest.mark.parametrize("page", ["schedules.md", "add-a-schedule.md", "add-an-index.md", "inference.md"])
def test_what_a_guide_prints_is_what_it_shows(page: str, tmp_path: Path) -> None:
    program, shown, *_ = blocks(DOCS / page)
    (tmp_path / program.title).write_text(program.text, encoding="utf-8")
    assert run([sys.executable, program.title], tmp_path) == shown.text


def test_the_blocks_of_the_front_ends_are_one_program(tmp_path: Path) -> None:
    program = "\n".join(block.text for block in blocks(DOCS / "front-ends.md") if block.language == "python")
    (tmp_path / "front_ends.py").write_text(program, encoding="utf-8")
    run([sys.executable, "front_ends.py"], tmp_path)


def test_the_report_in_the_guide_is_of_a_program_that_runs(tmp_path: Path) -> None:
    """Its times are those of some machine; the rows are the same."""
    found = blocks(DOCS / "diagnose.md")
    (tmp_path / "report.py").write_text(next(b.text for b in found if b.title == "report.py"), encoding="utf-8")
    printed = run([sys.executable, "report.py"], tmp_path)
    shown = next(b.text for b in found if b.text.startswith("Report on"))
    for words in ("Report on train_step", "step time", "peak memory, as compiled", "model FLOPs utilisation"):
        assert words in shown
        assert words in printed


def test_the_step_sharded_by_hand_in_the_guide_is_read(tmp_path: Path) -> None:
    program = next(b.text for b in blocks(DOCS / "diagnose.md") if b.title == "gpt2_by_hand.py")
    check = (
        "from autopar.hand_sharded import read_hand_sharded as read; step, args = make(); print(read(step, args).mesh)"
    )
    (tmp_path / "gpt2_by_hand.py").write_text(f"{program}\n\n{check}\n", encoding="utf-8")
    assert run([sys.executable, "gpt2_by_hand.py"], tmp_path).strip() == "2x4"


# -- completeness ----------------------------------------------------------------------------


def test_every_public_name_is_documented() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    names = {*re.findall(r"import \w+ as (\w+)", Path(autopar.__file__).read_text(encoding="utf-8"))}
    assert names, "autopar/__init__.py imports what is public"
    missing = [name for name in sorted(names) if f"`autopar.{name}`" not in page]
    assert not missing, f"docs/api.md says nothing of {missing}"


@pytest.mark.parametrize("function", [autopar.plan, autopar.ParallelStep.init, autopar.ParallelStep.lower])
def test_every_option_is_documented(function: object) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert callable(function)
    options = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    missing = [name for name in options if name not in page]
    assert not missing, f"docs/api.md says nothing of {missing}"


def test_every_public_member_of_a_plan_and_a_step_is_documented() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for owner, prefix in ((autopar.Plan, "plan"), (autopar.ParallelStep, "step")):
        methods = [name for name, item in vars(owner).items() if not name.startswith("_") and callable(item)]
        missing = [name for name in methods if f"`{prefix}.{name}(" not in page]
        assert not missing, f"docs/api.md says nothing of {owner.__name__}'s {missing}"


def test_every_error_has_a_section() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AutoparError)]
    missing = [name for name in classes if f"\n## {name}\n" not in page]
    assert not missing, f"docs/troubleshooting.md has no section on {missing}"


def test_the_listing_of_the_code_is_complete() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`([\w/]+\.py)`", row)
    }
    package = ROOT / "autopar"
    there = {str(file.relative_to(package)) for file in package.rglob("*.py") if file.name != "__init__.py"}
    assert listed == there, f"not listed: {sorted(there - listed)}; not there: {sorted(listed - there)}"


def test_the_layers_are_those_that_are_held() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    held = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    shown = next(block.text for block in blocks(DOCS / "architecture.md") if block.language == "text")
    assert shown.splitlines() == held


def test_the_picture_names_what_is_there() -> None:
    picture = (DOCS / "images" / "architecture.svg").read_text(encoding="utf-8")
    named = re.findall(r'class="module">([\w/]+(?:\.py|/))<', picture)
    assert len(named) > 8, "the picture names its modules"
    missing = [name for name in named if not (ROOT / "autopar" / name).exists() and not (ROOT / name).exists()]
    assert not missing, f"the picture shows {missing}"


# -- links -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{id_of(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{id_of(page)} links to {target}"


def _anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page != DOCS / "README.md"]
    missing = [page for page in pages if f"({page})" not in index]
    assert not missing, f"docs/README.md does not list {missing}"
