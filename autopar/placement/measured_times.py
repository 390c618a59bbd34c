"""Write and read measured step times of an engine, which correct the predicted ones.

In: seconds of an engine's programs. Out: a JSON file, and from it the layout and the seconds of each shape.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import PlacementError
from autopar.inference.schedule.requests import Shape
from autopar.placement.layouts import Layout

_FORMAT = "autopar-step-times"


def write_step_times(
    path: str | os.PathLike[str], seconds: Mapping[Shape, float], layout: Layout | None = None
) -> None:
    """Write measured seconds.

    Args:
        seconds: the seconds of an iteration of each shape, for example `engine.runner.seconds()`.
        layout: the layout that was measured; by default one device.
    """
    rows = [{**shape._asdict(), "seconds": each} for shape, each in seconds.items()]
    content = {"format": _FORMAT, "version": 1, **(layout or Layout())._asdict(), "steps": rows}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_step_times(path: str | os.PathLike[str]) -> tuple[Layout, dict[Shape, float]]:
    """Read measured seconds.

    Raises:
        PlacementError: the file cannot be read, or is not one that `write_step_times` wrote.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["version"] != 1:
            raise ValueError(f"the format is {content['format']!r}, version {content['version']!r}")
        seconds = {Shape(*(_count(row, field) for field in Shape._fields)): _seconds(row) for row in content["steps"]}
        return Layout(_count(content, "tensor"), _count(content, "pipeline")), seconds
    except OSError as error:
        raise PlacementError(f"the step times {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlacementError(
            f"{path} has no step times of an engine ({error}): write it by `autopar.placement.write_step_times`"
        ) from None


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


def _seconds(row: Mapping[str, Any]) -> float:
    value = row["seconds"]
    if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"seconds is {value!r}")
    return float(value)
