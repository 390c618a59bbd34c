"""What a piece is measured with: where its plans are, at which scale, and on how many devices. A plain value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """For one piece.

    Args:
        plans: the folder of prepared plans. scale: of what is measured: `full`, or `tiny` for a dry run on CPUs.
        profile: the devices' hardware profile, or None. num_devices: that are here.
        seconds: that the piece may take, about.
    """

    plans: Path
    scale: Literal["full", "tiny"]
    profile: str | None
    num_devices: int
    seconds: float

    @property
    def is_tiny(self) -> bool:
        return self.scale == "tiny"
