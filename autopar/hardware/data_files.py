"""Find the data about devices that comes with autopar: hardware profiles, and rates of the replay.

In: the name of a folder in `cost_models`. Out: its path, the names in it, what a mistyped name may mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import HardwareError
from autopar.system.source_paths import PACKAGE


def data_folder(name: str, what: str, package: Path = PACKAGE) -> Path:
    """A folder of `cost_models`: inside the package in a wheel, next to the package in a checkout.

    Args:
        what: its content, for the error.

    Raises:
        HardwareError: it is in neither place.
    """
    places = (package / "cost_models" / name, package.parent / "cost_models" / name)
    for place in places:
        if place.is_dir():
            return place
    raise HardwareError(f"the {what} are missing: looked in {places[0]} and {places[1]}; reinstall autopar")


def names_in(folder: Path) -> tuple[str, ...]:
    """Names of the TOML files in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def suggestion(name: str, known: Sequence[str]) -> str:
    """ " Did you mean 'h100-sxm'?" for an unknown name; empty where none is close."""
    # A prefix wins over similarity: `h100` means `h100-sxm`, though `h200` is closer.
    stem = name.strip().lower() or "?"
    close = [one for one in known if one.startswith(stem)] or difflib.get_close_matches(stem, known, n=1)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
