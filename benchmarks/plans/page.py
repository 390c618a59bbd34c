"""Render the page of the plans: autopar's speedup over sharding by hand, setting by setting, and the gates.

In: rows of `benchmarks.plans.parts`. Out: Markdown. Plain Python: no JAX. The best plan by hand is the fastest one that
fits, by XLA's estimate, over both ways of writing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

Row = Mapping[str, Any]

MEMORY_BYTES = 80e9
OWN = "autopar"
FULL, STRONG, HOSTS = ("8 GPUs",), ("8 GPUs, batch of 8", "16 GPUs, batch of 8"), ("2 hosts", "8 hosts")
TIGHT = "8 GPUs, 40 % of the memory"
#: The gates: the most that autopar may be behind the best plan by hand; the speedup over it, the share of models with
#: that speedup, and the mean speedup; the most behind with little memory; the speedup over the best single recipe as
#: users write it.
NEVER_BEHIND, AHEAD, SHARE_AHEAD, MEAN_AHEAD, TIGHT_BEHIND, AHEAD_OF_USERS = 1.02, 1.1, 2 / 3, 1.15, 1.25, 1.5

_COLUMNS = (
    "model",
    "best as users write it",
    "best by an expert",
    "autopar",
    "ahead",
    "peak: best by hand, autopar",
    "sent: best by hand, autopar",
    "plan",
    "planned in, compiled in",
)


def summary(rows: Sequence[Row]) -> str:
    """The gates, then a table for each setting."""
    cases = cases_of(rows)
    settings = dict.fromkeys(row["setting"] for row in rows)
    parts = [_gates(cases)]
    for setting in settings:
        lines = [_line(case) for case in cases if case[0]["setting"] == setting]
        parts += [f"**{setting}**", _table(_COLUMNS, lines)]
    parts.append("Every recipe of every model follows.")
    return "\n\n".join(parts)


def cases_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The programs of each model in each setting."""
    return [list(group) for _, group in groupby(rows, lambda row: (row["setting"], row["model"]))]


def page_table(rows: Sequence[Row]) -> str:
    """All programs of one model in one setting."""
    lines = []
    for row in rows:
        about = [row["recipe"] + ("" if row["recipe"] == OWN else f", {row['way']}"), row.get("mesh", "")]
        if row["failed"]:
            lines.append([*about, "failed", "", "", "", row["failed"].replace("|", "/")[:120]])
            continue
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(row["counts"].items()))
        figures = [_ms(row["step_s"]), _ms(row["exposed_s"]), _gb(row["peak_bytes"]), _gb(row["sent_bytes"])]
        lines.append([*about, *figures, counts])
    return _table(("recipe", "mesh", "step", "exposed", "peak", "sent", "collectives"), lines)


def best(case: Iterable[Row], *ways: str) -> Row | None:
    """The fastest program that fits, among those written in one of these ways."""
    of_these = [row for row in case if row["way"] in ways and _fits(row)]
    return min(of_these, key=lambda row: row["step_s"], default=None)


def ahead(case: Sequence[Row]) -> float | None:
    """Seconds of the best step by hand over autopar's. None if one of them does not run or has no estimate; infinity if
    nothing by hand fits."""
    own, hand = best(case, OWN), best(case, "user", "expert")
    if own is None:
        return None
    return math.inf if hand is None else hand["step_s"] / own["step_s"]


def _gates(cases: Sequence[Sequence[Row]]) -> str:
    def of(*settings: str) -> list[tuple[str, float | None]]:
        return [
            (f"{case[0]['model']} ({case[0]['setting']})", ahead(case))
            for case in cases
            if case[0]["setting"] in settings
        ]

    lines = [_never_behind("(a) 8 GPUs, full batch", of(*FULL))]
    for name, settings in (("(b) strong scaling", STRONG), ("(c) 2 and 8 hosts", HOSTS)):
        known = [value for _, value in of(*settings) if value is not None]
        if known:
            share = sum(value >= AHEAD for value in known) / len(known)
            gate = f"at least {AHEAD} on {SHARE_AHEAD:.0%}, mean {MEAN_AHEAD}"
            value = f"{share:.0%}, geometric mean {_mean(known):.2f}"
            lines.append(
                [
                    f"{name}: ahead of the best by hand",
                    value,
                    gate,
                    _met(share >= SHARE_AHEAD and _mean(known) >= MEAN_AHEAD),
                ]
            )
        lines.append(_never_behind(name, of(*settings)))
    lines.append(_tight(cases))
    lines.append(_users(cases))
    lines += _planning(cases)
    return _table(("gate", "value", "wanted", "met"), [line for line in lines if line])


def _never_behind(name: str, values: Sequence[tuple[str, float | None]]) -> list[str]:
    if not values:
        return []
    unknown = [case for case, value in values if value is None]
    behind = [(1 / value, case) for case, value in values if value is not None]
    worst, case = max(behind, default=(math.inf, ""))
    cell = f"{worst:.3f} ({case})" + (f"; none for {', '.join(unknown)}" if unknown else "")
    return [
        f"{name}: over the best by hand, worst",
        cell,
        f"{NEVER_BEHIND}",
        _met(worst <= NEVER_BEHIND and not unknown),
    ]


def _tight(cases: Sequence[Sequence[Row]]) -> list[str]:
    found = []
    for case in cases:
        own, hand = best(case, OWN), best(case, "user", "expert")
        if case[0]["setting"] == TIGHT and hand is not None:
            kept = own is not None and own["peak_bytes"] <= own["budget_bytes"]
            found.append((own["step_s"] / hand["step_s"] if own is not None and kept else math.inf, case[0]["model"]))
    if not found:
        return []
    worst, model = max(found)
    return [
        "(d) 40 % of the memory: over the best by hand with all of it, worst",
        f"{worst:.2f} ({model})",
        f"{TIGHT_BEHIND}",
        _met(worst <= TIGHT_BEHIND),
    ]


def _users(cases: Sequence[Sequence[Row]]) -> list[str]:
    """Speedup over the single recipe that is best if applied to all models.

    That recipe fits the most models; models that it does not fit are left out of its mean.
    """
    times: dict[str, dict[Any, float]] = {}
    own_times: dict[Any, float] = {}
    for case in cases:
        if case[0]["setting"] == TIGHT:
            continue
        own = best(case, OWN)
        if own is None:
            continue
        where = (case[0]["setting"], case[0]["model"])
        own_times[where] = own["step_s"]
        for row in case:
            if row["way"] == "user" and _fits(row):
                times.setdefault(_kind(row["recipe"]), {}).setdefault(where, row["step_s"])
    if not times:
        return []
    ratios = {kind: [seconds / own_times[where] for where, seconds in found.items()] for kind, found in times.items()}
    kind = max(ratios, key=lambda one: (len(ratios[one]), -_mean(ratios[one])))
    cell = f"{_mean(ratios[kind]):.2f} ({kind}, which fits {len(ratios[kind])} of {len(own_times)})"
    return [
        "ahead of the best single recipe as users write it, geometric mean",
        cell,
        f"{AHEAD_OF_USERS}",
        _met(_mean(ratios[kind]) >= AHEAD_OF_USERS),
    ]


def _planning(cases: Sequence[Sequence[Row]]) -> list[list[str]]:
    """Planning times. If the compile was not in the same run, an earlier compile is the baseline."""
    found: dict[bool, list[tuple[float, str]]] = {False: [], True: []}
    for case in cases:
        own = next((row for row in case if row["way"] == OWN and not row["failed"]), None)
        if own is not None:
            ratio = own["plan_s"] / own["compile_s"]
            found[own["budget_bytes"] is not None].append((ratio, f"{own['model']}, {own['setting']}"))
    lines = []
    for tight, ratios in found.items():
        if ratios:
            worst, where = max(ratios)
            enough = sum(ratio <= 1 for ratio, _ in ratios)
            cell = "planning over XLA's compile of the same step, worst" + (
                ", of those with little memory" if tight else ""
            )
            lines.append([cell, f"{worst:.2f} ({where}); {enough} of {len(ratios)} at most 1", "1.0", _met(worst <= 1)])
    return lines


def _kind(recipe: str) -> str:
    """A recipe without its number of GPUs; for a grid, with its number of tensor-parallel ways."""
    return f"tensor parallel {recipe.rsplit('x', 1)[-1]}" if recipe.startswith("data x tensor") else recipe


def _line(case: Sequence[Row]) -> list[str]:
    user, expert, hand, own = best(case, "user"), best(case, "expert"), best(case, "user", "expert"), best(case, OWN)
    planned = next((row for row in case if row["way"] == OWN), None)
    value = ahead(case)
    cell = "" if planned is None or planned["failed"] else f"{planned['plan_s']:.0f} s, {planned['compile_s']:.0f} s"
    return [
        case[0]["model"],
        _told(user),
        _told(expert),
        "none" if own is None else _ms(own["step_s"]),
        "" if value is None else f"**{value:.2f}**",
        ", ".join("none" if row is None else _gb(row["peak_bytes"]) for row in (hand, own)),
        ", ".join("none" if row is None else _gb(row["sent_bytes"]) for row in (hand, own)),
        "" if own is None else f"{own['words']}; {own['mesh']}",
        cell,
    ]


def _told(row: Row | None) -> str:
    return "none fits" if row is None else f"{_ms(row['step_s'])} ({row['recipe']})"


def _fits(row: Row) -> bool:
    return not row["failed"] and row["step_s"] is not None and row["peak_bytes"] <= MEMORY_BYTES


def _mean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def _ms(seconds: float | None) -> str:
    return "no estimate" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
