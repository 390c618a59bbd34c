"""List the pieces, the most important first: their names, approximate times, and the functions that measure them.

In: a name and a setting. Out: a record, as plain JSON. Modules that measure are imported on demand.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.models import MODELS, ON_SEVERAL
from benchmarks.gpu.setting import Record, Setting

#: Seconds after which a piece is stopped.
LIMIT_S = 480.0


@dataclass(frozen=True, slots=True)
class Piece:
    """One measurement.

    Args:
        module: a module of this package.
        function: the function of the module.
        given: an argument of the function before the setting, if any.
        seconds: approximate time on a GPU, from the process's start to its end.
        least_devices: number of devices that it needs.
    """

    module: str
    function: str
    given: str | None
    seconds: float
    least_devices: int = 1

    def measure(self, setting: Setting) -> Record:
        """Measure it in this process."""
        found: Any = getattr(importlib.import_module(f"benchmarks.gpu.{self.module}"), self.function)
        return (found if self.given is None else partial(found, self.given))(setting)


PIECES: Mapping[str, Piece] = MappingProxyType(
    {
        "calibration": Piece("calibration", "calibration", None, 90.0),
        **{f"train/{name}": Piece("train", "train", name, 100.0) for name in MODELS},
        "attention/kernels": Piece("attention", "attention", None, 60.0),
        **{
            f"inference/{part}": Piece("serve", part, None, seconds)
            for part, seconds in {"attention": 60.0, "decode": 180.0, "prefill": 90.0, "host": 60.0}.items()
        },
        **{f"search/{kind}": Piece("search", "search", kind, 150.0) for kind in ("exact", "ivf", "graph")},
        **{f"several/{name}": Piece("several", "several", name, 240.0, least_devices=2) for name in ON_SEVERAL},
    }
)


def selected(only: str, names: Collection[str] = PIECES) -> list[str]:
    """The names that have a part of `only` in them, in the order of the parts, which commas separate.

    >>> selected("search/exact,calib")
    ['search/exact', 'calibration']
    """
    return list(dict.fromkeys(name for part in only.split(",") for name in names if part.strip() in name))
