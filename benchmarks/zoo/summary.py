"""Render the zoo's rows as a page: one line per model and number of GPUs, and details of failed checks.

In: rows of `benchmarks.zoo.proof`. Out: Markdown. Plain Python: no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_COLUMNS = (
    "model",
    "GPUs",
    "plan",
    "mesh",
    "peak predicted",
    "peak compiled",
    "fits 80 GB",
    "unpredicted over 1 MB",
    "without a rule",
    "step predicted",
    "replayed",
    "XLA's estimate",
)


def summary(rows: Sequence[Row]) -> str:
    """The number of rows that pass, then every row."""
    made = [row for row in rows if not row["failed"]]
    counts = (
        f"{len(made)} of {len(rows)} were planned and compiled; {sum(row['fits'] for row in made)} fit in 80 GB,"
        f" {sum(not row['unpredicted'] for row in made)} have no unpredicted collective over 1 MB, and in"
        f" {sum(not row['fallbacks'] for row in made)} nothing that matters runs without a rule (more than 1 % of the"
        f" operations, or a result over 1 MB). Bytes are those of one GPU; `plan` is the time to trace the step and to"
        f" plan it on every mesh of so many GPUs, and its CPU time in brackets. The step time is the planner's, the replay's,"
        " and the estimate of XLA's scheduler, left out where it is known to be wrong (docs/replay.md)."
    )
    return "\n\n".join([counts, _table(_COLUMNS, [_line(row) for row in rows])])


def page_table(rows: Sequence[Row]) -> str:
    """The details that the summary's line leaves out."""
    return "\n".join(f"- {row['gpus']} GPUs: {_details(row)}" for row in rows)


def _line(row: Row) -> list[str]:
    about = [row["model"], str(row["gpus"])]
    if row["failed"]:
        return [*about, *["-"] * (len(_COLUMNS) - 3), "failed"]
    strangers, without = row["unpredicted"], row["fallbacks"]
    return [
        *about,
        f"{row['plan_s']:.0f} s ({'-' if row['plan_cpu_s'] is None else format(row['plan_cpu_s'], '.0f') + ' s'})",
        row["mesh"],
        f"{row['peak_predicted'] / 1e9:.1f} GB",
        f"{row['peak_compiled'] / 1e9:.1f} GB",
        "yes" if row["fits"] else "**no**",
        f"**{len(strangers)}, {sum(one[1] for one in strangers) / 1e6:.0f} MB**" if strangers else "none",
        f"**{', '.join(sorted({one[0] for one in without}))}**" if without else "none",
        f"{1e3 * row['step_predicted_s']:.1f} ms",
        _milliseconds(row["step_replayed_s"]),
        "-" if row["estimate_errors"] else _milliseconds(row["step_xla_s"]),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _details(row: Row) -> str:
    if row["failed"]:
        return row["failed"]
    parts = [
        f"{row['words']}; mesh {row['mesh']}",
        f"{row['equations']:,} equations, {row['decisions']:,} decisions, {row['status']} (gap {row['gap']:.2%}),"
        f" traced in {row['trace_s']:.1f} s, compiled in {row['compile_s']:.0f} s",
        f"{row['wire_predicted'] / 1e9:.2f} GB sent predicted, {row['wire_compiled'] / 1e9:.2f} compiled",
    ]
    if row["estimate_errors"]:
        parts.append(f"XLA's estimate is wrong for {', '.join(row['estimate_errors'])}")
    if row["step_xla"] is not None:
        simulated, xla = _milliseconds(row["step_xla_predicted"]), _milliseconds(row["step_xla"])
        parts.append(f"XLA's estimate, simulated {simulated}, by XLA {xla}")
    if row["attempts"] > 1:
        parts.append(f"planned {row['attempts']} times, for XLA's program of an earlier plan took more than the budget")
    if row["off"]:
        parts.append(f"off by more than `verify`'s tolerance: {', '.join(row['off'])}")
    parts += [f"unpredicted: {kind} of {size / 1e6:.1f} MB, `{path}`" for kind, size, path in row["unpredicted"][:8]]
    parts += [
        f"without a rule: `{name}`, {share:.1%} of the operations, {size / 1e6:.1f} MB, {where}"
        for name, share, size, where in row["fallbacks"][:8]
    ]
    return ". ".join(parts)


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
