"""Take the seed of the held-out models from the planner's newest commit.

In: this repository. Out: the first eight hex digits of the commit that last changed rules, cost, simulation or planner.
Nobody chooses it, and nobody knows it before the change is committed: a change that suits the models of one seed is
measured on those of another. Plain Python: no JAX.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.machine import ROOT

#: What decides plans and predictions.
PATHS = tuple(f"autopar/{package}" for package in ("rules", "cost", "xla_model", "planner", "formulate", "transforms"))
DIGITS = 8


class SeedError(Exception):
    """There is no seed: no repository, or changes that are not committed."""


def seed(root: Path = ROOT) -> str:
    """The seed.

    Args:
        root: the repository.

    Raises:
        SeedError: `root` is no repository, or one of `PATHS` has changes that are not committed.
    """
    changed = _git(root, "status", "--porcelain", "--", *PATHS)
    if changed:
        raise SeedError(f"commit these changes first, because the seed is their commit's:\n{changed}")
    commit = _git(root, "log", "-1", "--format=%H", "--", *PATHS)
    if not commit:
        raise SeedError(f"no commit in {root} changes {', '.join(PATHS)}")
    return commit[:DIGITS]


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if ran.returncode:
        raise SeedError(f"git {arguments[0]} failed in {root}: {ran.stderr.strip()}")
    return ran.stdout.strip()
