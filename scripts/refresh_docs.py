"""Run what README, tutorial and guides show, and put the real output into them.

Usage, from the repository root: `.venv/bin/python scripts/refresh_docs.py`, after a change to what
`explain` prints or to what the planner finds. The pages are made from `scripts/docs_templates/`, in
which `@NAME@` stands where output goes; edit those, then read the sentences around the new output.
`tests/test_docs.py` fails when a page shows what is no longer printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = Path(__file__).resolve().parent / "docs_templates"
ENVIRONMENT = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "COLUMNS": "100",
    "PYTHONPATH": str(ROOT),
}
WIDTH = 118
MOST_ACTIVATION_LINES = 64


def run(arguments: list[str], folder: Path, *, may_fail: bool = False) -> str:
    """What a Python program prints (its errors, where it may fail)."""
    env = ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache")}  # no plan of an earlier run
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode and not may_fail:
        sys.exit(done.stdout[-2000:] + done.stderr[-3000:])
    return done.stderr if may_fail else done.stdout


def tutorial(folder: Path) -> str:
    """Its Python blocks, run in order; what each prints goes into the text block that follows it."""
    page = (TEMPLATES / "tutorial.md").read_text()
    blocks = list(re.finditer(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", page, re.M | re.S))
    tokens: list[str | None] = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] == "python":
            mark = "print(end='\\f', flush=True)\n" if block[2] == "train.py" else ""
            with (folder / block[2]).open("a") as file:
                file.write(f"{block[3]}\n{mark}")
        if block[1] == "python" and block[2] == "train.py":
            tokens.append(following[3].strip() if following and following[1] == "text" else None)
    for token, text in zip(tokens, run(["train.py"], folder).split("\f"), strict=False):
        if token is not None:
            page = page.replace(token, (text.split("How to read it")[0] if token == "@HEAD@" else text).strip("\n"))
    commands = [line for block in blocks if block[1] == "sh" for line in block[3].splitlines()]
    printed = [run(["-m", *shlex.split(line)], folder) for line in commands]
    too_small = "-m autopar plan gpt.py:large --mesh 8 --hardware h100-sxm --memory-budget 4GB"
    refusal = run(shlex.split(too_small), folder, may_fail=True)
    return page.replace("@CLI@", printed[-1].rstrip()).replace("@SHORT@", textwrap.fill(refusal.strip(), WIDTH))


def section(report: str, start: str, end: str | None, most_lines: int | None = None) -> str:
    """A part of a report, from one heading to before another."""
    first = report.index(start)
    lines = report[first : report.index(end, first) if end else None].strip("\n").splitlines()
    return "\n".join([*lines[:most_lines], "…"] if most_lines and len(lines) > most_lines else lines)


def reading_a_plan(folder: Path) -> str:
    """The guide's report is the tutorial's last."""
    report = run(["-m", "autopar", "explain", "large.plan.json"], folder)
    page = (TEMPLATES / "reading-a-plan.md").read_text()
    for token, start, end in (
        ("HEAD", "Plan of", "Predicted step"),
        ("TOTALS", "Predicted step", "How to read"),
        ("PARAMS", "Parameters:", "Data and other"),
        ("DATA", "Data and other", "Optimizer state,"),
        ("STATE", "Optimizer state,", "Large activations"),
        ("ACTS", "Large activations", "Collectives:"),
        ("COLL", "Collectives:", "Other meshes"),
        ("REJECTED", "Other meshes", None),
    ):
        most = MOST_ACTIVATION_LINES if token == "ACTS" else None
        page = page.replace(f"@{token}@", section(report, start, end, most))
    return page


def collectives(folder: Path) -> str:
    """The page on all-reduces: the table that its command prints. Its picture is drawn by the same command."""
    page = (TEMPLATES / "collectives.md").read_text()
    command = re.search(r"^autopar (explain --collectives .*)$", page, re.M)
    assert command, "the page has a command"
    picture = ["--plot", str(ROOT / "docs" / "images" / "all-reduce.png")]
    printed = run(["-m", "autopar", *shlex.split(command[1]), *picture], folder)
    return page.replace("@TABLE@", printed.split("Drawn into")[0].rstrip())


def verifying(folder: Path) -> str:
    """The page on `verify`: its report of the tutorial's large model, which XLA compiles for it."""
    page = (TEMPLATES / "verify.md").read_text()
    command = re.search(r"^autopar (verify .*)$", page, re.M)
    assert command, "the page has a command"
    return page.replace("@VERIFY@", run(["-m", "autopar", *shlex.split(command[1])], folder).rstrip())


def checkpoints(folder: Path) -> str:
    """The page on checkpoints: what its commands print, one after the other, and what a larger model is refused."""
    page = (TEMPLATES / "checkpoints.md").read_text()
    for title, text in re.findall(r"^```python title=\"([^\"]+)\"\n(.*?)^```$", page, re.M | re.S):
        (folder / title).write_text(text)
    commands = re.findall(r"^```sh\n(.*?)\n```$", page, re.M | re.S)
    for token, line in zip(("@EIGHT@", "@FOUR@", "@DIFF@"), commands, strict=True):
        program, *arguments = shlex.split(line)
        page = page.replace(
            token, run(["-m", "autopar", *arguments] if program == "autopar" else arguments, folder).rstrip()
        )
    deeper = (folder / "train.py").read_text().replace("range(4)", "range(5)")
    (folder / "deeper.py").write_text(deeper)
    refusal = run(["deeper.py", "8", "8"], folder, may_fail=True).strip().splitlines()[-1]
    page = page.replace("@REFUSED@", textwrap.fill(refusal, WIDTH))
    rows = json.loads((ROOT / "benchmarks" / "results" / "second_start.jsonl").read_text().splitlines()[-1])["rows"][0]
    parts = (("the plan", "plan_"), ("`init`", "init_"), ("the first step", "first_step_"), ("together", ""))
    columns = ("first_{}s", "second_{}s", "first_{}cpu_s", "second_{}cpu_s")
    table = [f"| {name} | " + " | ".join(f"{rows[c.format(key)]:.1f} s" for c in columns) + " |" for name, key in parts]
    return page.replace("@STARTS@", "\n".join(table))


def readme(folder: Path) -> str:
    """Its example, run; the demo's block is kept as it stands."""
    page = (TEMPLATES / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.S)
    assert example, "the README has an example"
    (folder / "example.py").write_text(example[1])
    report = run(["example.py"], folder)
    shown = f"{section(report, 'Plan of', 'How to read')}\n…\n{section(report, 'Parameters:', 'Large activations')}"
    page = page.replace("@OUTPUT@", shown)
    proof = (ROOT / "benchmarks" / "results" / "proof.md").read_text()
    page = page.replace("@PROOF@", section(proof, "|  | plans", "\n\n"))
    demo = re.compile(r"<!-- demo-output -->.*?<!-- /demo-output -->", re.S)
    kept = demo.search((ROOT / "README.md").read_text())
    return demo.sub(lambda _: kept[0], page) if kept else page


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pages = {"docs/tutorial.md": tutorial(folder), "docs/reading-a-plan.md": reading_a_plan(folder)}
        pages["docs/collectives.md"] = collectives(folder)
        pages["docs/verify.md"] = verifying(folder)
        pages["docs/checkpoints.md"] = checkpoints(folder)
        pages["README.md"] = readme(folder)
    for path, page in pages.items():
        left = sorted(set(re.findall(r"@[A-Z0-9]+@", page)))
        assert not left, f"nothing was put in place of {left} in {path}"
        (ROOT / path).write_text(page)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
