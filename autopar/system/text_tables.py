"""Format the tables and figures of reports as text.

In: rows, figures, functions that draw on a console. Out: rich renderables; plain text of `TEXT_WIDTH` columns; JSON
without infinities. Every text is a rich `Text`, so that a user's paths and types are never parsed as markup.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import Box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autopar.system.units import without_controls

#: Width of a text report, in columns.
TEXT_WIDTH = 100
#: ASCII headings underlined with dashes, without other borders: safe to pipe anywhere.
_BOX = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def plain_text(draw: Callable[[Console], None]) -> str:
    """The output of `draw` as text of `TEXT_WIDTH` columns without styles."""
    console = new_console(file=io.StringIO(), width=TEXT_WIDTH, force_terminal=False, color_system=None)
    with console.capture() as captured:
        draw(console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def new_console(**options: Any) -> Console:
    """A rich console that escapes control characters, which names in a plan or a program may contain."""
    console = Console(**options)
    console.push_render_hook(_WithoutControls())
    return console


class _WithoutControls(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Rendered(one) for one in renderables]


@dataclass(frozen=True, slots=True)
class _Rendered:
    what: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.what, options):
            yield Segment(text if control else without_controls(text), style, control)


def new_table(*headings: str, right: Sequence[str] = ()) -> Table:
    """A table with underlined headings; the columns in `right` are right-aligned."""
    table = Table(box=_BOX, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        justify = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def section(title: str, table: Table, left_out: str = "") -> list[RenderableType]:
    return [Text(title, "bold"), Text(), inset(table), *([inset(Text(left_out, "dim"))] if left_out else []), Text()]


def inset(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def bars(parts: Sequence[tuple[str, float]], total: float, human: Callable[[float], str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=18)
    table.add_column(justify="right", min_width=8)
    table.add_column(justify="right", min_width=5)
    table.add_column(style="cyan")
    for name, value in parts:
        bar = "#" * round(40 * min(1.0, max(0.0, value) / total)) if total > 0 else ""
        table.add_row(Text(name), Text(human(value)), Text(share_text(value, total)), Text(bar))
    return table


def share_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 and math.isfinite(whole) else ""


def short_source(source: str) -> str:
    """`/home/me/gpt.py:12 (loss)` as `gpt.py:12`."""
    match = re.search(r"[^/\\]*:\d+", source)
    return match[0] if match else source


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def facts_table(facts: Sequence[tuple[str, str]]) -> RenderableType:
    """A table of names and their texts."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(Text(name), Text(text))
    return inset(table)


def notes_section(notes: Sequence[str]) -> list[RenderableType]:
    """A list of notes under a heading; empty without notes."""
    if not notes:
        return []
    table = Table.grid(padding=(0, 1, 0, 0))
    for note in notes:
        table.add_row("-", Text(note))
    return [Text("Notes", "bold"), inset(table)]
