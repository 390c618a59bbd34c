"""Tables of the documentation, from the newest committed results: how far predictions are off, and what is kept.

Usage: `python -m benchmarks.docs_tables predictions` (or `together`, `plans`, `experts`, `starts`). Out: a table in Markdown. The figures are the
median and the worst over all cases of a benchmark; nothing is measured here, and no case is left out.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.plans.page import ahead, cases_of
from benchmarks.proof_summary import OWN, Row, done, off, own_rank, percent, table
from benchmarks.run import newest_rows

_Error = Callable[[Row], float | None]


def predictions() -> str:
    """Predicted beside what XLA's GPU compiler makes of the same plans."""
    proof = done(newest_rows("proof"))
    errors: Mapping[str, tuple[Sequence[Row], Mapping[str, _Error]]] = {
        "models fitted to": ([row for row in proof if row["fitted"]], _PROOF),
        "models held out": ([row for row in proof if not row["fitted"]], _PROOF),
        "models of others": (done(newest_rows("zoo")), _ZOO),
        "smaller and smaller budgets": (newest_rows("memory_sweep"), _SWEEP),
    }
    header = ["median error", *(f"{name}, {len(rows)} plans" for name, (rows, _) in errors.items())]
    lines = [
        [figure, *(_median_and_worst(rows, of[figure]) if figure in of else "-" for rows, of in errors.values())]
        for figure in _PROOF
    ]
    least = [_named(min(_known(rows, of["peak memory"]))) for rows, of in errors.values()]
    lines.insert(1, ["of it too little, at most", *least])
    return table(header, lines)


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
    """The same in three lines: all real models, whoever split or wrote them."""
    proof, zoo = done(newest_rows("proof")), done(newest_rows("zoo"))
    lines = []
    for figure in _PROOF:
        errors = [abs(error) for error, _ in _known(proof, _PROOF[figure]) + _known(zoo, _ZOO[figure])]
        near = sum(error <= 0.1 for error in errors) / len(errors)
        lines.append([figure, str(len(errors)), *map(percent, (statistics.median(errors), near, max(errors)))])
    return table(["", "plans", "median error", "off by at most 10 %", "worst"], lines)


def plans() -> str:
    """What a plan should be, and in how many cases it was."""
    proof, zoo = done(newest_rows("proof")), done(newest_rows("zoo"))
    own = [row for row in proof if row["recipe"] == OWN and row["step_xla_s"]]
    ratios = [row["step_xla_s"] / _best_by_hand(row, proof) for row in own]
    budgets = [row for row in newest_rows("memory_sweep") if row["keeps"] != ""]
    measured = next(row for row in newest_rows("step_time") if row["sharding"] == OWN)
    lines = [
        [
            "its own plan is the fastest but for 2 %, by XLA's estimate",
            _of(own_rank(row, proof)[0] == 1 for row in own),
        ],
        ["its time over the best by hand, by XLA's estimate", f"{statistics.median(ratios):.2f} ({max(ratios):.2f})"],
        ["the same, measured on 8 virtual CPU devices, of one model", f"{measured['autopar_over_best']:.2f}"],
        ["XLA's program keeps to the memory budget", _of(bool(row["keeps"]) for row in budgets)],
        ["models of others fit in 80 GB, as compiled", _of(bool(row["fits"]) for row in zoo)],
        ["and send nothing over 1 MB that no decision foresaw", _of(not row["unpredicted"] for row in zoo)],
    ]
    return table(["of autopar's plans", "cases, or median (worst)"], lines)


def experts() -> str:
    """Autopar's plans beside sharding by hand, setting by setting: how many times as fast, where both ran."""
    rows = newest_rows("plans")
    cases = cases_of(rows)
    lines = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        here = [case for case in cases if case[0]["setting"] == setting]
        known = [(value, str(case[0]["model"])) for case in here if (value := ahead(case)) and math.isfinite(value)]
        if known:
            mean = statistics.geometric_mean(value for value, _ in known)
            least, most = (f"{value:.2f} ({model})" for value, model in (min(known), max(known)))
            lines.append([setting, str(len(known)), f"{mean:.2f}", least, most])
    header = ["GPUs and batch", "models", "times as fast as the best by hand, mean", "least", "most"]
    return table(header, lines)


def starts() -> str:
    """What a first and a second start take."""
    (row,) = newest_rows("second_start")
    parts = {"the plan": "plan_", "`init`": "init_", "the first step": "first_step_", "together": ""}
    keys = ("first_{}s", "second_{}s", "first_{}cpu_s", "second_{}cpu_s")
    lines = [[name, *(f"{row[key.format(part)]:.1f} s" for key in keys)] for name, part in parts.items()]
    return table(["", "first start", "second start", "first, CPU time", "second, CPU time"], lines)


def _best_by_hand(own: Row, rows: Iterable[Row]) -> float:
    """Seconds of the fastest plan by hand of the same model for as many GPUs, by XLA's estimate."""
    same = (own["model"], own["gpus"])
    by_hand = [row for row in rows if row["recipe"] != OWN and (row["model"], row["gpus"]) == same]
    return min(row["step_xla_s"] for row in by_hand if row["step_xla_s"])


def _median_and_worst(rows: Sequence[Row], error_of: _Error) -> str:
    known = _known(rows, error_of)
    median = statistics.median(abs(error) for error, _ in known)
    return f"{percent(median)}, worst {_named(max(known, key=lambda pair: abs(pair[0])))}"


def _known(rows: Sequence[Row], error_of: _Error) -> list[tuple[float, str]]:
    """Errors with the names of their cases, without those that nothing is known to hold against."""
    errors = [(error_of(row), row) for row in rows]
    return [
        (error, str(row.get("case") or row.get("budget") or f"{row['model']}@{row['gpus']}"))
        for error, row in errors
        if error is not None
    ]


def _named(one: tuple[float, str]) -> str:
    return f"{percent(one[0], signed=True)}<br>{one[1]}"


def _of(cases: Iterable[bool]) -> str:
    held = list(cases)
    return f"{sum(held)} of {len(held)}"


if __name__ == "__main__":
    of = {"predictions": predictions, "together": together, "plans": plans, "experts": experts, "starts": starts}
    print(of[sys.argv[1]]())
