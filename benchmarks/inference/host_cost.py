"""Measure the host's CPU time of the engine over a device that takes none, against an earlier commit.

The engine, its scheduler and the packing of inputs are real; the device returns random tokens at once. All slots start with
prompts of 1,024 tokens and generate random tokens. The CPU time of the thread that steps the engine counts, per decode call
and per token; text is decoded where it is read, and that time is in a row of its own. The earlier commit is 8ed5d62, in which
every slot was an object; it runs the same program, in turns, in processes of its own. The last rows have prompts with half of
their tokens in common. The medians of five turns count.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.inference.rows import Row, row

BASELINE = "8ed5d62"
TURNS = 5
_ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).with_name("host_cost_program.py")
#: Slots, tokens of a prompt, tokens of an output, decode steps in a call, tokens that all prompts have in common.
CASES = {
    "64 slots": (64, 1024, 64, 1, 0),
    "256 slots": (256, 1024, 120, 1, 0),
    "64 slots, 8 steps a call": (64, 1024, 64, 8, 0),
    "256 slots, a common prefix": (256, 1024, 32, 1, 512),
}


def measure() -> list[Row]:
    """Rows of each case, and their ratios to the earlier commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", BASELINE, "autopar", "cost_models"], cwd=_ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        rows: list[Row] = []
        for name, case in CASES.items():
            turns = [
                {tree: _run(path, case) for tree, path in (("old", Path(folder)), ("new", _ROOT))} for _ in range(TURNS)
            ]
            rows += _rows(name, turns)
    return rows


def _run(tree: Path, case: tuple[int, ...]) -> dict[str, float]:
    command = [sys.executable, str(_PROGRAM), *map(str, case)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    return json.loads(subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=True).stdout)


def _rows(name: str, turns: list[dict[str, dict[str, float]]]) -> list[Row]:
    def median(tree: str, *keys: str) -> float:
        return statistics.median(sum(turn[tree][key] for key in keys) for turn in turns)

    def ratio(*keys: str) -> float:
        return median("new", *keys) / median("old", *keys)

    if "prefix" in name:
        return [
            row(f"{name}: prefill call", 1e3 * median("new", "prefill_s"), "ms"),
            row(f"{name}: prefill call / {BASELINE}", ratio("prefill_s")),
        ]
    return [
        row(f"{name}: decode call", 1e3 * median("new", "call_s"), "ms"),
        row(f"{name}: decode call / {BASELINE}", ratio("call_s"), at_most=0.3 if name == "64 slots" else None),
        row(f"{name}: token", 1e6 * median("new", "token_s"), "us"),
        row(f"{name}: token / {BASELINE}", ratio("token_s"), at_most=0.3 if name == "256 slots" else None),
        row(f"{name}: token and its text, read / {BASELINE}", ratio("token_s", "read_s")),
    ]
