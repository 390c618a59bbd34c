"""The setting of a measurement: the folder of plans, the scale, and the number of devices. A plain value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of one piece.

    Args:
        plans: folder of prepared plans.
        scale: `full`, or `tiny` for a dry run on CPUs.
        profile: the devices' hardware profile, or None.
        num_devices: number of devices of this host.
        seconds: approximate time that the piece may take.
    """

    plans: Path
    scale: Literal["full", "tiny"]
    profile: str | None
    num_devices: int
    seconds: float

    @property
    def is_tiny(self) -> bool:
        return self.scale == "tiny"
