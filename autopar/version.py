"""The package's version, which `pyproject.toml` reads from here, and those of what it works with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def versions_of(packages: Sequence[str] = ("jax", "ortools")) -> dict[str, str]:
    """This package's version and those of others, as far as they are installed: a saved plan runs without a solver."""
    found = {"autopar": __version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
