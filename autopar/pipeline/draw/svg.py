"""Draw a step's timeline as SVG: submeshes as rows, tasks in colours with their microbatch, bubbles in grey.

In: `PipelineTimeline`s, drawn one below the other on one scale, for example simulated and measured.
Out: SVG text. A task's tooltip shows what it is and its exact times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from autopar.pipeline.draw.palette import BUBBLE_COLOUR, INK, LOOKS, drawn_s, headline, phases_of, shade
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span
from autopar.system.units import human_seconds

_WIDTH, _LEFT, _RIGHT = 960, 84, 56
_ROW, _GAP, _TITLE, _AXIS, _LEGEND, _MARGIN = 24, 4, 30, 30, 30, 8
_CHARACTER = 6.4  # pixels of a digit in the font size of task numbers
_STYLE = (
    f"text{{fill:{INK}}} .title{{font-weight:bold;font-size:14px}} .name,.key{{font-size:12px}}"
    " .tick{font-size:11px;fill:#59626d} .number{font-size:11px;text-anchor:middle} .line{stroke:#c3c9d0;stroke-width:1}"
)
_VERSION_STYLE = " .version{font-size:8px;font-weight:bold;fill:#8c1d40}"


def timeline_svg(*timelines: PipelineTimeline) -> str:
    """Draw timelines one below the other."""
    wholes = drawn_s(timelines)
    longest = max(wholes)
    parts: list[str] = []
    top = float(_MARGIN)
    for timeline, whole in zip(timelines, wholes, strict=True):
        parts += _panel(timeline, top, whole, headline(timeline, longest / whole if whole else 1))
        top += _TITLE + timeline.num_submeshes * (_ROW + _GAP) + _AXIS
    parts += _legend(timelines, top)
    height = top + _LEGEND
    about = quoteattr("; ".join(headline(timeline) for timeline in timelines))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" height="{height:g}"'
        f' font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" role="img" aria-label={about}>'
    )
    ground = f'<rect width="{_WIDTH}" height="{height:g}" fill="#ffffff"/>'
    style = _STYLE + (_VERSION_STYLE if any(timeline.versions for timeline in timelines) else "")
    return "\n".join([head, f"<style>{style}</style>", ground, *parts, "</svg>"]) + "\n"


def _panel(timeline: PipelineTimeline, top: float, whole: float, title: str) -> list[str]:
    """Draw the title, rows and axis of one timeline.

    Args:
        whole: the seconds that the width represents.
    """
    scale = (_WIDTH - _LEFT - _RIGHT) / whole if whole else 0.0
    parts = [f'<text class="title" x="{_MARGIN}" y="{top + 16:g}">{escape(title)}</text>']
    first, pitch = top + _TITLE, _ROW + _GAP
    bottom = first + timeline.num_submeshes * pitch
    for submesh, (idle, fraction) in enumerate(zip(timeline.idle_s, timeline.bubble_fractions, strict=True)):
        y = first + submesh * pitch
        middle = y + _ROW / 2 + 4
        tooltip = f"submesh {submesh} idles {_exact(idle)} of {_exact(timeline.makespan_s)}, {100 * fraction:.3g} %"
        parts += [
            f'<text class="name" x="{_MARGIN}" y="{middle:g}">submesh {submesh}</text>',
            f'<rect class="bubble" x="{_LEFT}" y="{y:g}" width="{timeline.makespan_s * scale:.2f}" height="{_ROW}"'
            f' fill="{BUBBLE_COLOUR}"><title>{tooltip}</title></rect>',
            f'<text class="tick" x="{_WIDTH - _RIGHT + 8}" y="{middle:g}">{100 * fraction:.0f} %</text>',
        ]
        stages = timeline.stages_on(submesh)
        for span in timeline.on(submesh):
            parts += _task(span, timeline, stages, y, scale)
    for tick in _ticks(whole):
        x = _LEFT + tick * scale
        parts += [
            f'<path class="line" d="M{x:.2f} {bottom:g}v4"/>',
            f'<text class="tick" text-anchor="middle" x="{x:.2f}" y="{bottom + 16:g}">{human_seconds(tick)}</text>',
        ]
    return parts


def _task(span: Span, timeline: PipelineTimeline, stages: tuple[int, ...], y: float, scale: float) -> list[str]:
    x = _LEFT + (span.start_s - timeline.start_s) * scale
    width = span.seconds * scale
    task = span.task
    colour = shade(task.stage, stages, LOOKS[task.phase].colour)
    start, end = span.start_s - timeline.start_s, span.end_s - timeline.start_s
    version = timeline.versions.get(task)
    reads = "" if version is None else f", reads version {version}"
    tooltip = f"{task}{reads}, submesh {span.submesh}: {_exact(start)} to {_exact(end)}, {_exact(span.seconds)}"
    edge = ' stroke="#ffffff"' if width >= 3 else ""  # a thinner task would be all edge
    parts = [
        f'<rect class="{task.phase}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW}" fill="{colour}"{edge}>'
        f"<title>{escape(tooltip)}</title></rect>"
    ]
    number = "U" if task.phase == "update" else str(task.microbatch)
    if len(number) * _CHARACTER + 2 <= width:
        middle = x + width / 2
        small = ""
        if version is not None and (len(number) + 0.8 * len(str(version))) * _CHARACTER + 2 <= width:
            small = f'<tspan class="version" dy="4">{version}</tspan>'
        parts.append(
            f'<text class="number" x="{middle:.2f}" y="{y + _ROW / 2 + 4:g}" pointer-events="none">{number}{small}</text>'
        )
    return parts


def _legend(timelines: Sequence[PipelineTimeline], top: float) -> list[str]:
    """A swatch and a name for each phase that occurs, and a note on shades if a submesh has several stages."""
    entries = [(LOOKS[phase].colour, LOOKS[phase].name) for phase in phases_of(*timelines)]
    entries.append((BUBBLE_COLOUR, "idle"))
    parts: list[str] = []
    x = float(_LEFT)
    for colour, name in entries:
        parts += [
            f'<rect x="{x:g}" y="{top:g}" width="14" height="14" fill="{colour}"/>',
            f'<text class="key" x="{x + 19:g}" y="{top + 11.5:g}">{name}</text>',
        ]
        x += 19 + 6.6 * len(name) + 18
    if any(len(t.stages_on(submesh)) > 1 for t in timelines for submesh in range(t.num_submeshes)):
        parts.append(f'<text class="key" x="{x:g}" y="{top + 11.5:g}">lighter: a submesh\'s later stages</text>')
    if any(timeline.versions for timeline in timelines):
        parts.append(
            f'<text class="key" x="{x:g}" y="{top + 11.5:g}">small: the version of the weights that it reads</text>'
        )
    return parts


def _ticks(whole: float) -> list[float]:
    """About eight round times from 0 to the end."""
    if not whole:
        return [0]
    rough = whole / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
    return [i * step for i in range(int(whole / step + 1e-9) + 1)]


def _exact(seconds: float) -> str:
    """Seconds with nine digits, without a larger or smaller unit.
    >>> _exact(0.0125), _exact(3)
    ('0.0125 s', '3 s')
    """
    return f"{float(seconds):.9g} s"
