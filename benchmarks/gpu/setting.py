"""The setting of a measurement: folders, the scale, the number of devices, and the time it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Record = dict[str, Any]


class OutOfTimeError(Exception):
    """Too little time is left for the rest of a piece; what it kept before counts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of one piece.

    Args:
        plans: folder of prepared plans.
        results: folder of records.
        scale: `full`, or `tiny` for a dry run on CPUs.
        host: the record of this host.
        seconds: approximate time that the piece may take.
        ends_at: `time.monotonic()` at which the piece is stopped.
        keep: function that takes the record so far; it counts if the piece is stopped or fails later.
    """

    plans: Path
    results: Path
    scale: Literal["full", "tiny"]
    host: Record
    seconds: float
    ends_at: float
    keep: Callable[[Record], None]

    @property
    def is_tiny(self) -> bool:
        return self.scale == "tiny"

    @property
    def profile(self) -> str | None:
        """The devices' hardware profile, or None."""
        return self.host["profile"]

    @property
    def num_devices(self) -> int:
        """The number of devices of this host."""
        return self.host["num_devices"]

    @property
    def left_s(self) -> float:
        """Seconds until the piece is stopped."""
        return self.ends_at - time.monotonic()
