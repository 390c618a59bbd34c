"""Render the results' page: each part's docstring, its gates, and its rows as tables.

This file is no source of any part, so a change to it makes no measurement outdated.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.replay.order import order, reversed_pairs

Row = dict[str, Any]

PARTS = ("tables", "published", "agreement", "faults")


def summary(rows: list[Row]) -> str:
    """What each part measures, and what it found."""
    folder = Path(__file__).parent
    parts = []
    for name in PARTS:
        docstring = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")))
        parts.append(f"**{name}.** {docstring}")
    return "\n\n".join([*parts, "## Found", *(f"- {line}" for line in found(rows))]).replace("\n\n- ", "\n- ")


def found(rows: list[Row]) -> Iterable[str]:
    """One line for each part."""
    tables = [row for row in rows if "table" in row]
    if tables:
        met = sum(row["meets_target"] for row in tables)
        yield f"tables: {met} of {len(tables)} parts meet the targets"
    published = [row for row in rows if "run" in row]
    if published:
        errors = [row["error"] for row in published]
        low = [row["error_then"] for row in published if row.get("error_then", "") != ""]
        pairs = len(published) * (len(published) - 1) // 2
        yield (
            f"published runs: {len(published)}, used for no fit; the replay is {min(errors):+.0%} to {max(errors):+.0%} from"
            f" their tokens per second, {statistics.median(errors):+.0%} in the median; Kendall's tau"
            f" {order(published):.2f}, {len(reversed_pairs(published))} of {pairs} pairs in the wrong order"
        )
        if low:
            yield (
                f"of these, {len(low)} on GPUs of unknown peak: {min(low):+.0%} to {max(low):+.0%} at the NVL's,"
                f" {statistics.median(low):+.0%} in the median"
            )
    for row in rows:
        if "group" in row:
            median = row["median_difference"]
            yield (
                f"agreement with XLA, {row['group']}: {row['programs']} programs,"
                f" {'none' if median is None else f'{median:.1%}'} apart in the median"
            )
    faults = [row for row in rows if "fault" in row]
    if faults:
        yield f"faults: {sum(row['holds'] for row in faults)} of {len(faults)} change the step as they must"


def page_table(rows: list[Row]) -> str:
    """One table for each set of columns."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    return "\n\n".join(_table(columns, of) for columns, of in groups.items())


def _table(columns: tuple[str, ...], rows: list[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *([_text(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:g}" for key, number in value.items())
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
