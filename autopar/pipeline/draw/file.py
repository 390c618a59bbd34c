"""A step's timelines as a file: a picture, or a trace for Perfetto.

In: `PipelineTimeline`s, such as the simulated and its measured twin. Out: the file; its name says which of the two.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from autopar.errors import PlotError
from autopar.pipeline.draw.perfetto import perfetto_trace
from autopar.pipeline.draw.svg import timeline_svg
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.system.atomic_file import write_whole


def write_timelines(path: str | os.PathLike[str], *timelines: PipelineTimeline) -> None:
    """Write them, one under the other; the file appears whole or not at all.

    Args:
        path: `*.json` for Perfetto (ui.perfetto.dev), else SVG.

    Raises:
        PlotError: where it cannot be written.
    """
    write_drawing(
        path, json.dumps(perfetto_trace(*timelines)) if Path(path).suffix == ".json" else timeline_svg(*timelines)
    )


def write_drawing(path: str | os.PathLike[str], text: str) -> None:
    """Write a picture or a trace, whole or not at all.

    Raises:
        PlotError: where it cannot be written.
    """
    try:
        write_whole(text, path)
    except OSError as error:
        raise PlotError(
            f"cannot write {str(path)!r}: {error.strerror}. Give a file in a folder that can be written to"
        ) from error
