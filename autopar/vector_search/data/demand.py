"""Hold what `index="auto"` chooses by: drives, prices, updates, and the rate that is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autopar.errors import SearchError


@dataclass(frozen=True, slots=True)
class Demand:
    """What an index is needed for.

    Args:
        path: where a kind on disk is written; None: only kinds in memory.
        reader: as in `build_on_disk`; for kinds on disk.
        disk_bytes_per_s: read bandwidth of the drive.
        updates_per_s: vectors that are inserted or deleted per second.
        queries_per_s: rate that is needed.
        memory_usd, disk_usd: price of a GB for a month; None: the fastest kind is chosen, not the cheapest.
    """

    path: str | os.PathLike[str] | None = None
    reader: str | None = None
    disk_bytes_per_s: float = 5e9
    updates_per_s: float = 0.0
    queries_per_s: float = 0.0
    memory_usd: float | None = None
    disk_usd: float | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Demand:
        """Parse the settings of `build(index="auto")`.

        Raises:
            SearchError: an unknown setting, or an invalid value.
        """
        known = {field.name for field in fields(cls)}
        for name, value in settings.items():
            if name not in known:
                raise SearchError(
                    f"`index='auto'` has no setting {name!r}: its settings are {', '.join(sorted(known))}. Name a kind to give"
                    " settings of that kind"
                )
            if name in ("path", "reader"):
                continue
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            least = "at least 0" if name in ("updates_per_s", "queries_per_s") else "above 0"
            if not is_number or not 0 <= value < math.inf or (value == 0 and least == "above 0"):
                raise SearchError(f"`{name}` is {value!r}: give a number {least}")
        made = cls(**settings)
        if (made.memory_usd is None) != (made.disk_usd is None):
            raise SearchError("only one of `memory_usd` and `disk_usd` is given: give both prices, or none")
        if made.updates_per_s and made.path is None:
            raise SearchError(
                f"`updates_per_s` is {made.updates_per_s:g}, and only lists on disk can be changed: give the `path` of a folder"
            )
        return made

    @property
    def file(self) -> dict[str, Any]:
        """The settings of a kind on disk."""
        given = {"path": self.path, "reader": self.reader}
        return {name: value for name, value in given.items() if value is not None}
