"""Print the documentation's tables from the newest committed results: prediction errors, budgets met, start times.

Usage: `python -m benchmarks.docs_tables predictions` (or `held_out`, `together`, `plans`, `experts`,
`faster_by_hand`, `starts`). Out: a table in Markdown. Each figure is the median or the worst over all cases of a benchmark. This module measures nothing and leaves
no case out.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.held_out.draw import NUM_MODELS
from benchmarks.held_out.page import as_drawn, gates, groups
from benchmarks.held_out.tuned import tuned
from benchmarks.plans.page import TIGHT, ahead, cases_of, on_part_of
from benchmarks.plans.split import HAND, best, is_current, variant_text
from benchmarks.proof_summary import OWN, Row, done, off, own_rank, percent, table
from benchmarks.run import newest_rows

_Error = Callable[[Row], float | None]


def predictions() -> str:
    """Predicted figures compared with XLA's GPU compiler, one line per figure and group of models."""
    proof = done(newest_rows("proof"))
    groups: Mapping[str, tuple[Sequence[Row], Mapping[str, _Error]]] = {
        "fitted models": ([row for row in proof if row["fitted"]], _PROOF),
        "held-out models": ([row for row in proof if not row["fitted"]], _PROOF),
        "third-party models": (done(newest_rows("zoo")), _ZOO),
        "shrinking memory budgets": (newest_rows("memory_sweep"), _SWEEP),
    }
    lines = []
    for figure in _PROOF:
        known = {name: _known(rows, of[figure]) for name, (rows, of) in groups.items() if figure in of}
        for name, errors in known.items():
            median = percent(statistics.median(abs(error) for error, _ in errors))
            worst = max(errors, key=lambda pair: abs(pair[0]))
            lines.append([f"{figure}, {name} ({len(groups[name][0])} plans)", median, _named(worst)])
        if figure == "peak memory":
            lines += [[f"largest underestimate, {name}", "", _named(min(errors))] for name, errors in known.items()]
    return table(["figure", "median error", "worst error, and its case"], lines)


_PROOF: Mapping[str, _Error] = {
    "peak memory": lambda row: row["peak_off"],
    "bytes sent": lambda row: row["wire_off"],
    "step time, by XLA's estimate": lambda row: row["step_off"],
}
_ZOO: Mapping[str, _Error] = {
    "peak memory": lambda row: off(row["peak_predicted"], row["peak_compiled"]),
    "bytes sent": lambda row: off(row["wire_predicted"], row["wire_compiled"]),
    "step time, by XLA's estimate": lambda row: off(row["step_xla_predicted"], row["step_xla"]),
}
_SWEEP: Mapping[str, _Error] = {
    "peak memory": lambda row: off(row["predicted_gb"], row["compiled_gb"]),
    "step time, by XLA's estimate": lambda row: off(row["predicted_xla_ms"], row["xla_ms"]),
}


def together() -> str:
    """Prediction errors over all real models, one line per figure."""
    proof, zoo = done(newest_rows("proof")), done(newest_rows("zoo"))
    lines = []
    for figure in _PROOF:
        errors = [abs(error) for error, _ in _known(proof, _PROOF[figure]) + _known(zoo, _ZOO[figure])]
        near = sum(error <= 0.1 for error in errors) / len(errors)
        lines.append([figure, str(len(errors)), *map(percent, (statistics.median(errors), near, max(errors)))])
    return table(["", "plans", "median error", "within 10 %", "worst"], lines)


def plans() -> str:
    """The number of cases in which a plan is fastest, fits its budget, and sends only the predicted collectives."""
    proof, zoo = done(newest_rows("proof")), done(newest_rows("zoo"))
    own = [row for row in proof if row["recipe"] == OWN and row["step_xla_s"]]
    ratios = [row["step_xla_s"] / _best_by_hand(row, proof) for row in own]
    budgets = [row for row in newest_rows("memory_sweep") if row["keeps"] != ""]
    measured = next(row for row in newest_rows("step_time") if row["sharding"] == OWN)
    lines = [
        [
            "fastest plan, within 2 %, by XLA's estimate",
            _of(own_rank(row, proof)[0] == 1 for row in own),
        ],
        [
            "step time relative to the best hand-written plan, by XLA's estimate",
            f"{statistics.median(ratios):.2f} ({max(ratios):.2f})",
        ],
        ["the same, measured on 8 virtual CPU devices, one model", f"{measured['autopar_over_best']:.2f}"],
        ["compiled program fits the memory budget", _of(bool(row["keeps"]) for row in budgets)],
        ["third-party models fit in 80 GB, as compiled", _of(bool(row["fits"]) for row in zoo)],
        [
            "third-party models send nothing over 1 MB that the plan did not predict",
            _of(not row["unpredicted"] for row in zoo),
        ],
    ]
    return table(["autopar's plans", "cases, or median (worst)"], lines)


def experts() -> str:
    """Speedup of autopar's plans over the best hand-written sharding, per setting: over tuned recipes by the replay, and,
    where only an earlier version measured, over recipes without autopar's kernels and flags by XLA's estimate."""
    rows = newest_rows("plans")
    cases = cases_of(rows)
    lines = []
    for is_tuned, judged in ((True, "tuned recipes, by the replay"), (False, "not tuned, by XLA's estimate")):
        for setting in dict.fromkeys(row["setting"] for row in rows):
            here = [case for case in cases if case[0]["setting"] == setting and is_current(case) == is_tuned]
            known = [(value, str(case[0]["model"])) for case in here if (value := ahead(case)) and math.isfinite(value)]
            if known:
                mean = statistics.geometric_mean(value for value, _ in known)
                least, most = (f"{value:.2f} ({model})" for value, model in (min(known), max(known)))
                lines.append([setting, judged, str(len(known)), f"{mean:.2f}", least, most])
    header = [
        "GPUs and batch",
        "hand-written plans",
        "models",
        "speedup over the best, geometric mean",
        "lowest",
        "highest",
    ]
    return table(header, lines)


def faster_by_hand() -> str:
    """Every case with the same memory in which a hand-written program is faster than autopar's plan, the slowest plan first."""
    lines = []
    for case in cases_of(newest_rows("plans")):
        own, hand = best(case, OWN), best(case, *HAND)
        if is_current(case) and case[0]["setting"] != TIGHT and own and hand and hand["step_s"] < own["step_s"]:
            program = f"{hand['recipe']}{on_part_of(hand)}; {variant_text(hand)}"
            longer = own["step_s"] / hand["step_s"] - 1
            lines.append((-longer, [case[0]["model"], case[0]["setting"], program, percent(longer)]))
    header = ["model", "GPUs and batch", "fastest by hand", "autopar's plan takes longer by"]
    return table(header, [line for _, line in sorted(lines)])


def held_out() -> str:
    """The gates of the newest twelve models as they were drawn, also of those that were looked into later."""
    drawn = as_drawn(*groups(newest_rows("held_out"), tuned()))
    return table(["figure", "value", "gate", "met"], gates(drawn, is_finished=len(drawn) == NUM_MODELS))


def starts() -> str:
    """Seconds of a first and of a second start."""
    (row,) = newest_rows("second_start")
    parts = {"the plan": "plan_", "`init`": "init_", "the first step": "first_step_", "together": ""}
    keys = ("first_{}s", "second_{}s", "first_{}cpu_s", "second_{}cpu_s")
    lines = [[name, *(f"{row[key.format(part)]:.1f} s" for key in keys)] for name, part in parts.items()]
    return table(["", "first start", "second start", "first, CPU time", "second, CPU time"], lines)


def _best_by_hand(own: Row, rows: Iterable[Row]) -> float:
    """Seconds of the fastest hand-written plan of the same model on as many GPUs, by XLA's estimate."""
    same = (own["model"], own["gpus"])
    by_hand = [row for row in rows if row["recipe"] != OWN and (row["model"], row["gpus"]) == same]
    return min(row["step_xla_s"] for row in by_hand if row["step_xla_s"])


def _known(rows: Sequence[Row], error_of: _Error) -> list[tuple[float, str]]:
    """Errors with the names of their cases; cases without a compiled figure have none."""
    errors = [(error_of(row), row) for row in rows]
    return [
        (error, str(row.get("case") or _budget(row) or f"{row['model']}@{row['gpus']}"))
        for error, row in errors
        if error is not None
    ]


def _budget(row: Row) -> str:
    budget = str(row.get("budget") or "")
    return f"budget of {budget}" if budget.endswith("%") else budget


def _named(one: tuple[float, str]) -> str:
    return f"{percent(one[0], signed=True)}<br>{one[1].replace('/', '/<wbr>')}"  # allow a line break on a phone


def _of(cases: Iterable[bool]) -> str:
    held = list(cases)
    return f"{sum(held)} of {len(held)}"


if __name__ == "__main__":
    tables = (predictions, held_out, together, plans, experts, faster_by_hand, starts)
    print({made.__name__: made for made in tables}[sys.argv[1]]())
