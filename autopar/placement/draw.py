"""Draw a placement as SVG: devices in rows, groups over them, and in each group its models.

In: `ServingEstimate`. Out: SVG text. A model has one colour in all groups; a bar shows how busy a group is.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape, quoteattr

from autopar.placement.estimate_serving import ServingEstimate
from autopar.placement.tables import headline

_DEVICE, _GAP, _MARGIN, _HEAD, _PER_ROW = 112, 8, 16, 52, 4
_MODEL, _BAR, _CAPTION = 24, 8, 20
_INK, _LIGHT, _EMPTY = "#16191d", "#59626d", "#eceef1"
_COLOURS = (
    *("#8ab8f0", "#86cf8f", "#f3c969", "#cda7e8", "#f2a59d", "#8fd6d2", "#d9b38c", "#b9c6f2", "#c3dc8a", "#e8b4d4"),
    *("#a9b8c4", "#f0d9a0"),
)
_STYLE = (
    f"text{{fill:{_INK};font-size:12px}} .title{{font-weight:bold;font-size:14px}} .light{{fill:{_LIGHT};font-size:11px}}"
    " .model{text-anchor:middle}"
)


def placement_svg(estimate: ServingEstimate) -> str:
    """Draw the placement of an estimate."""
    found = estimate.found
    largest = max((group.layout.num_devices for group in found.placement.groups), default=1)
    per_row = min(max(_PER_ROW, largest), estimate.num_devices)
    num_rows = -(-estimate.num_devices // per_row)
    most = max((len(group.models) for group in found.placement.groups), default=1)
    title = headline(estimate)
    lines = [f"{part}{end}" for part, end in zip(title.split(": "), (":", ""), strict=True)]
    width = 2 * _MARGIN + max(per_row * (_DEVICE + _GAP) - _GAP, math.ceil(8.2 * max(map(len, lines))))
    row = _CAPTION + most * (_MODEL + 4) + _BAR + _CAPTION + 2 * _GAP
    height = _MARGIN + _HEAD + num_rows * (row + _GAP)
    parts: list[str] = []
    for device in range(estimate.num_devices):
        x, y = _at(device, per_row, row)
        parts.append(
            f'<rect class="device" x="{x}" y="{y}" width="{_DEVICE}" height="{row - _GAP}" rx="4" fill="{_EMPTY}"/>'
            f'<text class="light" x="{x + 6}" y="{y + row - _GAP - 6}">device {device}</text>'
        )
    for number in range(len(found.placement.groups)):
        parts += _group(estimate, number, per_row, row)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" role="img" aria-label={quoteattr(title)}>'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    text = [
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 12 + 20 * number}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return "\n".join([head, f"<style>{_STYLE}</style>", ground, *text, *parts, "</svg>"]) + "\n"


def _at(device: int, per_row: int, row: int) -> tuple[int, int]:
    """The left upper corner of a device."""
    return _MARGIN + device % per_row * (_DEVICE + _GAP), _MARGIN + _HEAD + device // per_row * (row + _GAP)


def _group(estimate: ServingEstimate, number: int, per_row: int, row: int) -> list[str]:
    """Draw one group over its devices."""
    found, group = estimate.found, estimate.found.placement.groups[number]
    x, y = _at(found.firsts[number], per_row, row)
    width = group.layout.num_devices * (_DEVICE + _GAP) - _GAP
    attainment, busy = found.outcome.attainment(), found.outcome.busy[number]
    names = [model.name for model in estimate.models]
    parts = [
        f'<rect class="group" x="{x}" y="{y}" width="{width}" height="{row - _GAP - _CAPTION}" rx="4" fill="#ffffff"'
        f' stroke="{_LIGHT}"/>',
        f'<text x="{x + 8}" y="{y + 15}">{escape(_fitting(group.layout.describe(), width))}</text>',
    ]
    for line, name in enumerate(group.models):
        top = y + _CAPTION + line * (_MODEL + 4) + 2
        share = attainment.get(name, math.nan)
        about = name if math.isnan(share) else f"{name}: {100 * share:.1f} % of requests within their bounds"
        parts.append(
            f'<g><title>{escape(about)}</title><rect x="{x + 6}" y="{top}" width="{width - 12}" height="{_MODEL}" rx="3"'
            f' fill="{_COLOURS[names.index(name) % len(_COLOURS)]}"/><text class="model" x="{x + width / 2:g}"'
            f' y="{top + 16}">{escape(_fitting(name, width))}</text></g>'
        )
    top = y + row - _GAP - _CAPTION - _BAR - 6
    parts.append(
        f'<g><title>busy for {100 * busy:.0f} % of the time</title><rect x="{x + 6}" y="{top}" width="{width - 12}"'
        f' height="{_BAR}" fill="{_EMPTY}"/><rect x="{x + 6}" y="{top}" width="{(width - 12) * min(1.0, busy):.1f}"'
        f' height="{_BAR}" fill="{_LIGHT}"/></g>'
    )
    return parts


def _fitting(text: str, width: float) -> str:
    """A text that fits into a width, cut if necessary."""
    most = max(1, int((width - 16) / 6.6))
    return text if len(text) <= most else f"{text[: most - 1]}…"
