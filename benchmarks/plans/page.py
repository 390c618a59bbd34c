"""Render the page of the plans: autopar's gain over sharding by hand and its split, setting by setting, and the gates.

In: rows of `benchmarks.plans.parts`. Out: Markdown. Plain Python: no JAX. The best plan by hand is the fastest one that
fits, over all ways of writing it and all numbers of GPUs. Cases that only an earlier version measured have tables of
their own: their hand-written plans had no tuned version, and their times are XLA's estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.plans.split import HAND, OWN, Split, best, fits, is_current, mean, split, variant_text

Row = Mapping[str, Any]

TIGHT = "8 GPUs, 40 % of the memory"
#: XLA's default combine threshold.
_DEFAULT_MIB = 30
#: The gates: the most that a tuned recipe may be behind its user's version, that autopar may be behind the best tuned
#: expert on any number of GPUs, and behind the best by hand with less memory.
TUNED_BEHIND, NEVER_BEHIND, TIGHT_BEHIND = 1.0, 1.02, 1.25

_COLUMNS = (
    "model",
    "best user, all GPUs",
    "best user, any number",
    "best tuned",
    "autopar",
    "tuned / autopar",
    "gain over the user",
    "= sharding",
    "x kernels",
    "x combiner",
    "x devices",
    "peak: tuned, autopar",
    "sent: tuned, autopar",
    "XLA's estimate: tuned, autopar",
    "plan",
)
_EARLIER = ("model", "best by hand", "autopar", "ahead", "peak: best by hand, autopar", "sent: best by hand, autopar")
_ALL = (
    "recipe",
    "GPUs",
    "mesh",
    "version",
    "step",
    "exposed",
    "XLA's estimate",
    "price",
    "peak",
    "sent",
    "collectives",
)


def summary(rows: Sequence[Row]) -> str:
    """The gates and the means, then a table for each setting."""
    cases = cases_of(rows)
    current = [case for case in cases if is_current(case)]
    replays = dict.fromkeys(row["replay"] for case in current for row in case if row.get("replay"))
    parts = [f"{len(current)} of {len(cases)} cases are of this version, timed by the replay {' or '.join(replays)}."]
    less = [case for case in current if not _has_larger_thresholds(case)]
    parts[0] += f" In {len(less)} of them, combine thresholds by hand end at XLA's default." if less else ""
    parts += [_gates(current), _means(current)] if current else []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        here = [case for case in cases if case[0]["setting"] == setting]
        for title, columns, line, of in (
            (f"**{setting}**", _COLUMNS, _line, [case for case in here if is_current(case)]),
            (
                f"**{setting}**, measured by an earlier version: hand-written plans without autopar's kernels and flags, times by XLA's estimate",
                _EARLIER,
                _earlier_line,
                [case for case in here if not is_current(case)],
            ),
        ):
            if of:
                parts += [title, _table(columns, [line(case) for case in of])]
    parts.append("Every program of every model follows.")
    return "\n\n".join(parts)


def _has_larger_thresholds(case: Sequence[Row]) -> bool:
    """Whether programs by hand had combine thresholds above XLA's default, as autopar's plans may have."""
    return any((row.get("limit_mib") or 0) > _DEFAULT_MIB for row in case)


def cases_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The programs of each model in each setting."""
    return [list(group) for _, group in groupby(rows, lambda row: (row["setting"], row["model"]))]


def page_table(rows: Sequence[Row]) -> str:
    """All programs of one model in one setting."""
    lines = []
    for row in rows:
        about = [row["recipe"], str(row.get("gpus_used", row["gpus"])), row.get("mesh", ""), _version(row)]
        if row["failed"]:
            lines.append([*about, "failed", "", "", "", "", "", row["failed"].replace("|", "/")[:120]])
            continue
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(row["counts"].items()))
        price = _ms(row["price_s"]) if row.get("price_s") else ""
        figures = [
            _time(row),
            _ms(row["exposed_s"]),
            _estimate(row),
            price,
            _gb(row["peak_bytes"]),
            _gb(row["sent_bytes"]),
        ]
        lines.append([*about, *figures, counts])
    return _table(_ALL, lines)


def ahead(case: Sequence[Row]) -> float | None:
    """Seconds of the best step by hand over autopar's. None if one of them does not run or has no time; infinity if
    nothing by hand fits."""
    own, hand = best(case, OWN), best(case, *HAND)
    if own is None:
        return None
    return math.inf if hand is None else hand["step_s"] / own["step_s"]


def _gates(cases: Sequence[Sequence[Row]]) -> str:
    lines = [_tuned(cases), _never_behind(cases), _tight(cases)]
    return _table(("gate", "value", "wanted", "met"), [line for line in lines if line])


def _means(cases: Sequence[Sequence[Row]]) -> str:
    """Geometric means of the gain and its split, for each setting."""
    lines = []
    for setting in dict.fromkeys(case[0]["setting"] for case in cases):
        found = [one for case in cases if case[0]["setting"] == setting and (one := split(case)) is not None]
        if found:
            lines.append([setting, str(len(found)), f"{mean(found).over_tuned:.3f}", *_factors(mean(found))])
    columns = ("geometric means", "models", "tuned / autopar", "gain over the user", "= sharding", "x kernels")
    return _table((*columns, "x combiner", "x devices"), lines)


def _tuned(cases: Sequence[Sequence[Row]]) -> list[str]:
    """Each tuned version over the user's version of the same recipe on the same GPUs."""
    found = []
    for case in cases:
        users = {(row["recipe"], row["gpus_used"]): row for row in case if row["way"] == "user" and fits(row)}
        for row in case:
            user = users.get((row["recipe"], row.get("gpus_used")))
            if row["way"] == "tuned" and fits(row) and user is not None:
                where = f"{row['recipe']} of {row['model']}, {row['setting']}"
                found.append((row["step_s"] / user["step_s"], where))
    if not found:
        return []
    worst, where = max(found)
    name = f"tuned over the user's version of the same recipe, worst of {len(found)}"
    return [name, f"{worst:.3f} ({where})", f"{TUNED_BEHIND}", _met(worst <= TUNED_BEHIND)]


def _never_behind(cases: Sequence[Sequence[Row]]) -> list[str]:
    values = [
        (f"{case[0]['model']} ({case[0]['setting']})", ahead(case)) for case in cases if case[0]["setting"] != TIGHT
    ]
    if not values:
        return []
    unknown = [case for case, value in values if value is None]
    behind = [(1 / value, case) for case, value in values if value is not None]
    worst, case = max(behind, default=(math.inf, ""))
    met = sum(value <= NEVER_BEHIND for value, _ in behind)
    cell = f"{worst:.3f} ({case}); {met} of {len(values)}" + (f"; none for {', '.join(unknown)}" if unknown else "")
    name = "autopar over the best tuned expert on any number of GPUs, worst"
    return [name, cell, f"{NEVER_BEHIND}", _met(worst <= NEVER_BEHIND and not unknown)]


def _tight(cases: Sequence[Sequence[Row]]) -> list[str]:
    found = []
    for case in cases:
        own, hand = best(case, OWN), best(case, *HAND)
        if case[0]["setting"] == TIGHT and hand is not None:
            kept = own is not None and own["peak_bytes"] <= own["budget_bytes"]
            found.append((own["step_s"] / hand["step_s"] if own is not None and kept else math.inf, case[0]["model"]))
    if not found:
        return []
    worst, model = max(found)
    return [
        "40 % of the memory: over the best by hand with all of it, worst",
        f"{worst:.2f} ({model})",
        f"{TIGHT_BEHIND}",
        _met(worst <= TIGHT_BEHIND),
    ]


def _line(case: Sequence[Row]) -> list[str]:
    on_all = best([row for row in case if row.get("gpus_used") == row["gpus"]], "user")
    user, hand, own = best(case, "user"), best(case, *HAND), best(case, OWN)
    found = split(case)
    return [
        case[0]["model"],
        _named(on_all),
        _named(user),
        _named(hand),
        "none" if own is None else _time(own) + on_part_of(own),
        "" if found is None else f"**{found.over_tuned:.3f}**",
        *(_factors(found) if found else [""] * 5),
        ", ".join("none" if row is None else _gb(row["peak_bytes"]) for row in (hand, own)),
        ", ".join("none" if row is None else _gb(row["sent_bytes"]) for row in (hand, own)),
        ", ".join("none" if row is None else _estimate(row) for row in (hand, own)),
        "" if own is None else f"{own['words']}; {own['mesh']}",
    ]


def _earlier_line(case: Sequence[Row]) -> list[str]:
    hand, own, value = best(case, *HAND), best(case, OWN), ahead(case)
    return [
        case[0]["model"],
        "none fits" if hand is None else f"{_time(hand)} ({hand['recipe']}, {hand['way']})",
        "none" if own is None else _time(own),
        "" if value is None else f"**{value:.2f}**",
        ", ".join("none" if row is None else _gb(row["peak_bytes"]) for row in (hand, own)),
        ", ".join("none" if row is None else _gb(row["sent_bytes"]) for row in (hand, own)),
    ]


def _factors(one: Split) -> list[str]:
    values = (one.gain, one.sharding, one.kernels, one.combiner, one.devices)
    return [f"{value:.3f}" for value in values]


def _named(row: Row | None) -> str:
    if row is None:
        return "none fits"
    variant = f"; {row['variant']}" if row.get("variant") else ""
    return f"{_time(row)} ({row['recipe']}{on_part_of(row)}{variant})"


def on_part_of(row: Row) -> str:
    """Text for how many GPUs a program runs on, if not on all."""
    used = row.get("gpus_used", row["gpus"])
    return "" if used == row["gpus"] else f", on {used} of {row['gpus']} GPUs"


def _version(row: Row) -> str:
    if row["way"] == "variant":
        return variant_text(row)
    return f"tuned: {row['variant']}" if row["way"] == "tuned" else row["way"]


def _time(row: Row) -> str:
    return _ms(row["step_s"])


def _estimate(row: Row) -> str:
    """XLA's estimate, where it is sound."""
    if "xla_s" not in row:
        return "" if "kind" in row else _time(row)
    return "not sound" if row["xla_errors"] else _ms(row["xla_s"])


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def _ms(seconds: float | None) -> str:
    return "no time" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
