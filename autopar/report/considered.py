"""Explain what was considered for a plan, and why it was not chosen.

In: the record `considered` of a plan made with `everything="auto"`. Out: a section of the text report; the texts of the rows for the page;
JSON types. Rows that would be faster than the chosen plan are always shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.plans.considered import Considered
from autopar.system.text_tables import new_table, section
from autopar.system.units import human_bytes, human_seconds

#: The most rows that are shown besides those that would be faster than the chosen plan; the JSON has all.
MAX_SLOWER = 12
#: The longest reason in the text; the JSON has all of it.
_MAX_REASON = 160
TITLE = "Considered, the chosen plan first"
HEADS = ("what", "microbatches", "step time", "peak memory", "why not")


@dataclass(frozen=True, slots=True)
class ConsideredRow:
    """The texts of a row, in the order of `HEADS`.

    Args:
        row: its figures.
    """

    row: Considered
    what: str
    microbatches: str
    step_time: str
    peak: str
    reason: str


def considered_rows(considered: Sequence[Considered]) -> tuple[list[ConsideredRow], int]:
    """The rows to show, and the number of rows that are left out."""
    if not considered:
        return [], 0
    chosen_s = considered[0].step_time_s
    faster = [one for one in considered if one.step_time_s < chosen_s]
    others = [one for one in considered if not one.step_time_s < chosen_s]
    shown = [others[0], *faster, *others[1 : 1 + MAX_SLOWER]]
    return [_row(one) for one in shown], len(considered) - len(shown)


def considered_section(considered: Sequence[Considered]) -> list[RenderableType]:
    """The section of the text report; nothing for plans without a record."""
    rows, left = considered_rows(considered)
    if not rows:
        return []
    numbers = HEADS[1:4]
    table = new_table(*HEADS, right=numbers)
    for one in rows:
        reason = one.reason if len(one.reason) <= _MAX_REASON else f"{one.reason[:_MAX_REASON]}..."
        table.add_row(Text(one.what), one.microbatches, Text(one.step_time), one.peak, Text(reason))
    under = "priced: simulated with the costs of planned runs of layers; other times are those of whole plans"
    return section(TITLE, table, f"and {left} more; --json has all\n{under}" if left else under)


def considered_json(considered: Sequence[Considered]) -> list[dict[str, Any]]:
    """All rows as JSON types."""
    return [{**asdict(one), "mesh": None if one.mesh is None else one.mesh.describe()} for one in considered]


def _row(one: Considered) -> ConsideredRow:
    is_known = math.isfinite(one.step_time_s)
    at_least = "at least " if one.certainty == "bounded" else ""
    priced = ", priced" if one.certainty == "priced" else ""
    return ConsideredRow(
        row=one,
        what=_what(one),
        microbatches=str(one.num_microbatches),
        step_time=f"{at_least}{human_seconds(one.step_time_s)}{priced}" if is_known else "-",
        peak=human_bytes(one.peak_bytes) if math.isfinite(one.peak_bytes) else "-",
        reason=one.reason or "chosen",
    )


def _what(one: Considered) -> str:
    if one.schedule:
        count = {0: "stages", 1: "one stage"}.get(one.num_stages, f"{one.num_stages} stages")
        return f"{count}, {one.schedule}" if one.schedule != "any" else count
    where = "" if one.num_devices is None else f" on {one.num_devices} device{'s' * (one.num_devices > 1)}"
    mesh = "" if one.mesh is None or one.num_devices == 1 else f", mesh {one.mesh}"
    remat = {None: "", True: ", rematerialized", False: ""}[one.rematerializes]
    return f"one program{where}{mesh}{remat}"
