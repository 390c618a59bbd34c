"""Write a step's timelines to a file, as a picture or as a trace for Perfetto.

In: `PipelineTimeline`s, for example simulated and measured.
Out: the file; its extension determines the format.
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
    """Write timelines one below the other. The write is atomic.

    Args:
        path: `*.json` for Perfetto (ui.perfetto.dev), else SVG.

    Raises:
        PlotError: the file cannot be written.
    """
    write_drawing(
        path, json.dumps(perfetto_trace(*timelines)) if Path(path).suffix == ".json" else timeline_svg(*timelines)
    )


def write_drawing(path: str | os.PathLike[str], text: str) -> None:
    """Write a picture or a trace atomically.

    Raises:
        PlotError: the file cannot be written.
    """
    try:
        write_whole(text, path)
    except OSError as error:
        raise PlotError(
            f"cannot write {str(path)!r}: {error.strerror}. Give a file in a folder that can be written to"
        ) from error
