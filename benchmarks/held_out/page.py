"""Render the page of the held-out models: the gates, every held-out model, and those of the tuning group.

In: rows of `benchmarks.held_out.parts`, and the list of models that were looked into. Out: Markdown. Plain Python: no
JAX. The list counts when the page is rendered, so a model that is listed later leaves the gates without a new run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.held_out.draw import NUM_MODELS
from benchmarks.held_out.tuned import Tuned, tuned

Row = Mapping[str, Any]

#: The gates: the largest median and single error of the step time and of memory, the smallest share of plans whose bytes
#: are exact, and the largest planning time over XLA's compile time on one host and between hosts.
STEP_MEDIAN, STEP_WORST = 0.05, 0.20
MEMORY_MEDIAN, MEMORY_WORST = 0.02, 0.08
EXACT_SHARE = 0.95
PLANNING_ONE_HOST, PLANNING_HOSTS = 1.0, 1.5

_COLUMNS = (
    "model",
    "GPUs",
    "plan",
    "step predicted",
    "replayed",
    "off",
    "peak predicted",
    "compiled",
    "off",
    "sent predicted",
    "compiled",
    "exact",
    "planning / compile",
)


def summary(rows: Sequence[Row], listed: Sequence[Tuned] | None = None) -> str:
    """The gates, the held-out models, the tuning group.

    Args:
        listed: models that were looked into; by default those of the file.
    """
    held_out, tuning = groups(rows, tuned() if listed is None else listed)
    all_drawn = as_drawn(held_out, tuning)
    is_finished = len(all_drawn) == NUM_MODELS
    columns = ("gate", "value", "wanted", "met")
    parts = [_drawn(held_out), table(columns, gates(held_out, is_finished=is_finished))]
    if len(all_drawn) > len(held_out):
        parts += [
            "As drawn, with those that somebody looked into afterwards:",
            table(columns, gates(all_drawn, is_finished=is_finished)),
        ]
    parts += [table(_COLUMNS, [_line(row) for row in held_out])]
    if tuning:
        parts += [
            "**The tuning group**: models that somebody looked into. They count in no gate.",
            table((*_COLUMNS, "looked into"), [[*_line(row), reason] for row, reason in tuning]),
        ]
    return "\n\n".join(parts)


def as_drawn(held_out: Sequence[Row], tuning: Sequence[tuple[Row, str]]) -> list[Row]:
    """All rows of the newest seed, also of models that were looked into later."""
    later = [row for row, _ in tuning if held_out and row["seed"] == held_out[-1]["seed"]]
    return sorted([*held_out, *later], key=lambda row: row["number"])


def page_table(rows: Sequence[Row]) -> str:
    """The details that the summary's line leaves out."""
    return "\n".join(f"- {_about(row)}: {row['gpus']} GPUs, {row['sizes']}. {_details(row)}" for row in rows)


def groups(rows: Sequence[Row], listed: Sequence[Tuned]) -> tuple[list[Row], list[tuple[Row, str]]]:
    """The held-out rows, and the rows of the tuning group with the reasons; each model once."""
    reasons = {(one.seed, one.number): one.reason for one in listed}
    newest = {(row["seed"], row["number"]): row for row in rows}
    return (
        [row for name, row in newest.items() if name not in reasons],
        [(row, reasons[name]) for name, row in newest.items() if name in reasons],
    )


def gates(rows: Sequence[Row], *, is_finished: bool) -> list[list[str]]:
    """Name, value, what is wanted, and whether it is met. An unfinished group meets no gate, and a group with a failed
    model none of predictions.

    Args:
        rows: the held-out models.
        is_finished: whether no model of the seed is missing.
    """
    is_finished = is_finished and len({row["seed"] for row in rows}) == 1
    whole = is_finished and not any(row["failed"] for row in rows)
    made = [row for row in rows if not row["failed"]]
    steps = [off for row in made if (off := step_off(row)) is not None]
    whole_steps = whole and len(steps) == len(rows)
    peaks = [peak_off(row) for row in made]
    over = [row for row in made if row["peak_compiled"] > row["budget_bytes"]]
    exact = sum(row["sent_exact"] for row in made)
    return [
        _error("step time, predicted against replayed", steps, STEP_MEDIAN, STEP_WORST, whole_steps),
        _error("peak memory, predicted against compiled", peaks, MEMORY_MEDIAN, MEMORY_WORST, whole),
        ["plans over the memory budget when compiled", f"{len(over)} of {len(rows)}", "0", _met(whole and not over)],
        [
            "plans whose bytes sent are exact",
            f"{exact} of {len(rows)}",
            f"{EXACT_SHARE:.0%}",
            _met(whole and exact >= EXACT_SHARE * len(rows)),
        ],
        _planning("one host", _on(rows, several=False), PLANNING_ONE_HOST, is_finished),
        _planning("between hosts", _on(rows, several=True), PLANNING_HOSTS, is_finished),
    ]


def step_off(row: Row) -> float | None:
    """Relative error of the step time; None where the program has no replay."""
    replayed = row["step_replayed_s"]
    return None if replayed is None else row["step_predicted_s"] / replayed - 1


def peak_off(row: Row) -> float:
    """Relative error of the peak."""
    return row["peak_predicted"] / row["peak_compiled"] - 1


def planning_over_compile(row: Row) -> float:
    """CPU time of planning over that of the compile."""
    return row["plan_cpu_s"] / row["compile_cpu_s"]


def _drawn(rows: Sequence[Row]) -> str:
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    failed = sum(bool(row["failed"]) for row in rows)
    text = (
        f"{len(rows)} of {NUM_MODELS} models are held out, {failed} of them failed; seed {', '.join(seeds) or 'none'}."
        " An error is (predicted - compiled) / compiled. Bytes sent are those of one GPU in a step; they are exact if, for"
        " every kind of collective over every set of mesh axes, they differ by at most 1 KiB or 0.01 %."
    )
    if len(seeds) > 1:
        text += " **Unfinished: the models are of several seeds, and only those of the newest one are held out.**"
    return text


def _on(rows: Iterable[Row], *, several: bool) -> list[Row]:
    return [row for row in rows if (row["hosts"] > 1) == several]


def _error(name: str, offs: Sequence[float], median: float, worst: float, whole: bool) -> list[str]:
    wanted = f"median {median:.0%}, worst {worst:.0%}"
    if not offs:
        return [name, "none", wanted, _met(False)]
    middle, most = statistics.median(map(abs, offs)), max(offs, key=abs)
    met = whole and middle <= median and abs(most) <= worst
    return [name, f"median {middle:.1%}, worst {most:+.1%} (of {len(offs)})", wanted, _met(met)]


def _planning(where: str, rows: Sequence[Row], most: float, is_finished: bool) -> list[str]:
    ratios = [planning_over_compile(row) for row in rows if not row["failed"]]
    worst = max(ratios, default=math.inf)
    value = f"median {statistics.median(ratios):.2f}, worst {worst:.2f} (of {len(ratios)})" if ratios else "none"
    met = is_finished and len(ratios) == len(rows) and worst <= most
    return [f"planning over XLA's compile, {where}", value, f"{most}", _met(met)]


def _line(row: Row) -> list[str]:
    about = [f"{row['number']}: {row['sizes'].split(':')[0]}", f"{row['gpus']}"]
    if "mesh" not in row:
        return [*about, _in_a_cell(row["failed"]), *["-"] * (len(_COLUMNS) - 3)]
    plan, step = f"{row['words']}; {row['mesh']}", _ms(row["step_predicted_s"])
    if row["failed"]:
        peak = ["-", "-", _gb(row["peak_predicted"])]
        return [*about, f"{plan}; {_in_a_cell(row['failed'])}", step, *peak, *["-"] * (len(_COLUMNS) - 7)]
    off = step_off(row)
    is_over = row["peak_compiled"] > row["budget_bytes"]
    return [
        *about,
        plan,
        step,
        "-" if row["step_replayed_s"] is None else _ms(row["step_replayed_s"]),
        "-" if off is None else f"{off:+.1%}",
        _gb(row["peak_predicted"]),
        f"**{_gb(row['peak_compiled'])}**, over the budget" if is_over else _gb(row["peak_compiled"]),
        f"{peak_off(row):+.1%}",
        _gb(row["sent_predicted"]),
        _gb(row["sent_compiled"]),
        "yes" if row["sent_exact"] else "**no**",
        f"{planning_over_compile(row):.2f}",
    ]


def _about(row: Row) -> str:
    return f"seed {row['seed']}, model {row['number']}"


def _details(row: Row) -> str:
    failed = " ".join(row["failed"].split())
    if "mesh" not in row:
        return failed
    solved = (
        f"{row['status']} (gap {row['gap']:.2%}), planned in {row['plan_s']:.0f} s ({row['plan_cpu_s']:.0f} s of CPU)"
    )
    if failed:
        return f"{solved}; {failed}"
    compiled = f"compiled in {row['compile_s']:.0f} s ({row['compile_cpu_s']:.0f} s of CPU)"
    replay = f"; no replay: {row['no_replay']}" if row["no_replay"] else ""
    return f"{solved}, {compiled}; budget {_gb(row['budget_bytes'])}{replay}"


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
