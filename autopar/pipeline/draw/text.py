"""Draw a step's timeline as text for terminals: a row per submesh, a cell per time interval.

In: `PipelineTimeline`s on one scale, for example simulated and measured.
Out: rich's `Text`, readable without colours: `F3` is the forward pass of microbatch 3 and lasts until the next letter
or dot; `.` is a bubble.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from autopar.pipeline.draw.palette import INK, LOOKS, drawn_s, headline, label, phases_of
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span


def timeline_text(*timelines: PipelineTimeline, width: int = 100) -> Text:
    """Draw timelines one below the other.

    Args:
        width: the maximal line length in characters. If tasks are shorter than a cell, the cell shows the longest one.
    """
    name_width = max(len(_name(t.num_submeshes - 1)) for t in timelines)
    columns = max(10, width - name_width - len("  100 %") - 1)
    wholes = drawn_s(timelines)
    longest = max(wholes)
    text = Text()
    for timeline, whole in zip(timelines, wholes, strict=True):
        together = [one for one, its in zip(timelines, wholes, strict=True) if its == whole]
        scale = _columns_per_second(together, whole, columns)
        text.append(f"{headline(timeline, longest / whole if whole else 1)}\n", "bold")
        row_columns = max(1, math.ceil(timeline.makespan_s * scale - 1e-6))
        for submesh, idle in enumerate(timeline.bubble_fractions):
            text.append(f"{_name(submesh):<{name_width}} ")
            _append_row(text, timeline, submesh, owners(timeline, submesh, scale, row_columns))
            text.append(f"  {100 * idle:3.0f} %\n", "dim")
    return text.append(_legend(timelines), "dim")


def _name(submesh: int) -> str:
    return f"submesh {submesh}"


def _columns_per_second(timelines: Sequence[PipelineTimeline], whole: float, columns: int) -> float:
    """Columns per second: the shortest task gets a whole number of cells, so that equal tasks look equal, and at
    most as many as a label needs. If it gets less than two, the line is filled instead.

    Args:
        whole: the seconds that a line represents.
    """
    shortest = min((s.seconds for t in timelines for s in t.spans if s.seconds > 0), default=0)
    if not shortest:
        return 0.0
    cells = math.floor(columns * shortest / whole + 1e-6)
    longest = max(_longest_label(timeline) for timeline in timelines)
    return min(cells, longest + 1) / shortest if cells > 1 else columns / whole


def _longest_label(timeline: PipelineTimeline) -> int:
    stages = [timeline.stages_on(submesh) for submesh in range(timeline.num_submeshes)]
    return max((len(label(span.task, stages[span.submesh])) for span in timeline.spans), default=1)


def owners(timeline: PipelineTimeline, submesh: int, scale: float, columns: int) -> list[Span | None]:
    """For each cell, the span that takes most of it; None for idle time."""
    owners: list[Span | None] = [None] * columns
    most, idle = [0.0] * columns, [1.0] * columns
    for span in timeline.on(submesh):
        start = (span.start_s - timeline.start_s) * scale
        end = (span.end_s - timeline.start_s) * scale
        for column in range(int(start), min(columns, math.ceil(end))):
            share = min(end, column + 1) - max(start, column)
            idle[column] -= share
            if share > most[column]:
                most[column], owners[column] = share, span
    return [owner if most[i] >= idle[i] else None for i, owner in enumerate(owners)]


def _append_row(text: Text, timeline: PipelineTimeline, submesh: int, owners: Sequence[Span | None]) -> None:
    stages = timeline.stages_on(submesh)
    for span, cells in groupby(owners):
        length = len(list(cells))
        if span is None:
            text.append("." * length, "dim")
            continue
        look = LOOKS[span.task.phase]
        shown = next((t for t in (label(span.task, stages), label(span.task, ())) if len(t) <= length), look.letter)
        text.append(shown.ljust(length), f"{INK} on {look.colour}")


def _legend(timelines: Sequence[PipelineTimeline]) -> str:
    looks = [f"{LOOKS[phase].letter} {LOOKS[phase].name}" for phase in phases_of(*timelines)]
    several = any(len(t.stages_on(submesh)) > 1 for t in timelines for submesh in range(t.num_submeshes))
    letters = "; a, b, …: the submesh's stages in order" if several else ""
    return f"{', '.join(looks)}; number: the microbatch{letters}; . idle; right: the idle share"
