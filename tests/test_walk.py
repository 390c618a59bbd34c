"""The path from a call of a planned step to the problem is short, and no package calls one above it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_way_is_short_and_goes_down() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "walk.py")]
    done = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": ""}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 calls from a lower package into a higher one" in done.stdout
    assert "formulate.formulation.formulate" in done.stdout
