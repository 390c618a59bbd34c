"""The examples a user may copy run as they stand; the demo's step is planned (`make demo` trains it)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_quickstart_trains_and_explains() -> None:
    assert "Predicted step time" in run("examples/quickstart.py")


def test_two_processes_train_by_one_command() -> None:
    assert "2 processes, 8 devices" in run("examples/two_processes.py")


def test_the_demo_can_be_planned_for_absent_gpus() -> None:
    options = ("--devices", "8", "--hardware", "h100-sxm")
    assert "8 h100-sxm devices" in run("-m", "autopar", "plan", "examples/train_gpt.py:target", *options)
