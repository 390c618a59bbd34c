"""Summarize the proof: how large the prediction errors are, and whether predictions rank plans as XLA does.

In: rows of `benchmarks.proof`. Out: `Summary`, and Markdown for the results' page and for `cost_models/accuracy.md`.
Plain Python: no JAX.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

#: Two plans whose XLA estimates differ by less than this share are not ranked.
SAME_S = 0.02
#: Predicted step times with an error of at most this count as close.
CLOSE = 0.20
OWN = "autopar"
GPUS_PER_HOST = 8
_ABOUT_HOSTS = (
    "Between hosts XLA's estimate takes its own fixed network, and is told how many GPUs a host has (`verify` says by"
    " which flag)."
)
BEGIN, END = "<!-- proof: begin -->", "<!-- proof: end -->"
ACCURACY = Path(__file__).parents[1] / "cost_models" / "accuracy.md"


# -- figures ---------------------------------------------------------------------------------


def off(predicted: float, compiled: float | None) -> float | None:
    """(predicted - compiled) / compiled; None where there is nothing to divide by.

    >>> off(110.0, 100.0), off(1.0, None)
    (0.1, None)
    """
    return (predicted - compiled) / compiled if compiled else None


def kendall_tau(predicted: Sequence[float], actual: Sequence[float], same: float = SAME_S) -> float | None:
    """Kendall's tau: concordant pairs less discordant pairs, over all pairs; None without pairs.

    Pairs whose actual figures are within `same` of the larger are left out. A pair with equal predictions and different
    actual figures counts as neither concordant nor discordant.

    >>> kendall_tau([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.3333333333333333
    """
    ranked = total = 0
    for (p, a), (q, b) in combinations(zip(predicted, actual, strict=True), 2):
        if abs(a - b) <= same * max(a, b):
            continue
        total += 1
        ranked += (p < q) - (p > q) if a < b else (p > q) - (p < q)
    return ranked / total if total else None


def tau_of(rows: Iterable[Row], predicted: str = "step_predicted_s", actual: str = "step_xla_s") -> float | None:
    """Kendall's tau over the plans of one model; only plans for equally many GPUs are compared.

    Args:
        predicted, actual: columns of the two step times.
    """
    score, weight = 0.0, 0
    for group in _by(done(rows), "model", "gpus").values():
        timed = [row for row in group if row[actual]]
        tau = kendall_tau([r[predicted] for r in timed], [r[actual] for r in timed])
        pairs = _num_pairs([r[actual] for r in timed])
        if tau is not None:
            score, weight = score + tau * pairs, weight + pairs
    return score / weight if weight else None


def own_rank(own: Row, rows: Iterable[Row]) -> tuple[int, int]:
    """The rank of autopar's plan, by XLA's estimate, among the hand-written plans for as many GPUs, and their number.

    A plan within 2 % of it does not rank above it.
    """
    by_hand = [
        row
        for row in done(rows)
        if row["recipe"] != OWN and (row["model"], row["gpus"]) == (own["model"], own["gpus"]) and row["step_xla_s"]
    ]
    better = [row for row in by_hand if row["step_xla_s"] < own["step_xla_s"] * (1 - SAME_S)]
    return 1 + len(better), 1 + len(by_hand)


def done(rows: Iterable[Row]) -> list[Row]:
    """The cases that were planned and compiled."""
    return [row for row in rows if not row.get("failed")]


def worst(rows: Iterable[Row], name: str) -> Row | None:
    """The row with the largest absolute error of this name."""
    with_one = [row for row in rows if row[name] is not None]
    return max(with_one, key=lambda row: abs(row[name]), default=None)


def median_error(rows: Iterable[Row], name: str) -> float | None:
    """The median absolute error of this name."""
    errors = [abs(row[name]) for row in rows if row[name] is not None]
    return statistics.median(errors) if errors else None


def share_within(rows: Iterable[Row], name: str, limit: float = CLOSE) -> float | None:
    """The share of rows whose error of this name is within a limit."""
    errors = [abs(row[name]) for row in rows if row[name] is not None]
    return sum(error <= limit for error in errors) / len(errors) if errors else None


# -- Markdown --------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> str:
    """Tables of the errors, of the ranks per model, and of autopar's own plans."""
    good = done(rows)
    failed = [row for row in rows if row.get("failed")]
    own = [row for row in good if row["recipe"] == OWN]
    groups = {
        f"{kind}, {hosts}": [row for row in good if row["fitted"] is fitted and (row["gpus"] <= GPUS_PER_HOST) is one]
        for kind, fitted in (("models fitted to", True), ("models held out", False))
        for hosts, one in (("one host", True), ("two hosts", False))
    }
    parts = [_errors(groups | {"autopar's own plans": own}), _models(good), _ABOUT_HOSTS, _replayed(good)]
    if own:
        parts.append(_own(own, good))
    seconds = [row["verify_s"] for row in good if row["verify_s"] is not None]
    if seconds:
        parts.append(
            f"`verify` takes {statistics.median(seconds):.1f} s beyond XLA's own compile (median of {len(seconds)}),"
            f" {max(seconds):.1f} s at most: tracing, lowering, starting XLA's process, comparing."
        )
    if failed:
        parts.append("Failed:\n\n" + "\n".join(f"- {row['case']}: {row['failed']}" for row in failed))
    return "\n\n".join(filter(None, parts))


def _errors(groups: Mapping[str, Sequence[Row]]) -> str:
    lines = []
    for name, rows in groups.items():
        if rows:
            lines.append(
                [
                    name,
                    str(len(rows)),
                    percent(median_error(rows, "peak_off")),
                    _worst_text(rows, "peak_off"),
                    _worst_text(rows, "wire_off"),
                    _worst_text(rows, "kind_off"),
                    str(sum(row["unpredicted_over_1mb"] for row in rows)),
                    percent(median_error(rows, "step_off")),
                    _worst_text(rows, "step_off"),
                    percent(share_within(rows, "step_off")),
                ]
            )
    return table(
        [
            "",
            "plans",
            "peak memory, median",
            "worst",
            "bytes sent, worst",
            "of one kind over the same axes, worst",
            "collectives over 1 MB unpredicted",
            "step time, median",
            "worst",
            "within 20 %",
        ],
        lines,
    )


def _models(rows: Sequence[Row]) -> str:
    lines = []
    for (model,), group in _by(rows, "model").items():
        one, two = (tau_of(r for r in group if (r["gpus"] <= GPUS_PER_HOST) is inside) for inside in (True, False))
        lines.append(
            [
                model + ("" if group[0]["fitted"] else " (held out)"),
                str(len(group)),
                percent(median_error(group, "peak_off")),
                _worst_text(group, "peak_off"),
                percent(median_error([r for r in group if r["gpus"] <= GPUS_PER_HOST], "step_off")),
                *("-" if tau is None else f"{tau:.2f}" for tau in (one, two)),
            ]
        )
    header = ["model", "plans", "peak memory, median", "worst", "step time on one host, median"]
    return table([*header, "Kendall's tau, one host", "two hosts"], lines)


def _replayed(rows: Sequence[Row]) -> str:
    """The planner's own step time against the replay of the compiled program, which shares no formula with it."""
    lines = []
    for (model,), group in _by(rows, "model").items():
        known = [row for row in group if row.get("replayed_s")]
        if not known:
            continue
        hosts = [[row for row in known if (row["gpus"] <= GPUS_PER_HOST) is inside] for inside in (True, False)]
        taus = [tau_of(part, "own_predicted_s", "replayed_s") for part in hosts]
        wrong = sorted({error for row in known for error in row["estimate_errors"]})
        lines.append(
            [
                model + ("" if group[0]["fitted"] else " (held out)"),
                str(len(known)),
                *(percent(median_error(part, "replay_off")) if part else "-" for part in hosts),
                _worst_text(known, "replay_off"),
                *("-" if tau is None else f"{tau:.2f}" for tau in taus),
                ", ".join(wrong) or "sound",
            ]
        )
    if not lines:
        return ""
    about = (
        "The planner's own step time against the [replay](../../docs/replay.md) of the compiled program, which shares no"
        " formula with it; neither is a measurement."
    )
    header = [
        "model",
        "plans",
        "difference, one host, median",
        "two hosts",
        "worst",
        "Kendall's tau, one host",
        "two hosts",
    ]
    return f"{about}\n\n" + table([*header, "XLA's estimate is wrong for"], lines)


def _own(own: Sequence[Row], rows: Sequence[Row]) -> str:
    lines = []
    for row in own:
        if row["step_xla_s"]:
            place, of = own_rank(row, rows)
            hand = [r for r in rows if (r["model"], r["gpus"]) == (row["model"], row["gpus"]) and r["recipe"] != OWN]
            best = min((r for r in hand if r["step_xla_s"]), key=lambda r: r["step_xla_s"], default=None)
            ratio = "-" if best is None else f"{row['step_xla_s'] / best['step_xla_s']:.2f}"
            lines.append([row["case"], row["words"], f"{place} of {of}", ratio, best["case"] if best else "-"])
    return table(
        ["own plan", "in words", "rank by XLA's estimate", "its time over the best by hand", "which is"], lines
    )


def page_table(rows: Sequence[Row]) -> str:
    """A table of all cases of one record, for the results' page."""
    lines = []
    for row in rows:
        if row.get("failed"):
            lines.append([row["case"], row["failed"], *["-"] * 12])
            continue
        lines.append(
            [
                row["case"],
                row["words"],
                gigabytes(row["peak_predicted"]),
                gigabytes(row["peak_compiled"]),
                percent(row["peak_off"], signed=True),
                megabytes(row["wire_predicted"]),
                megabytes(row["wire_compiled"]),
                percent(row["wire_off"], signed=True),
                f"{percent(row['kind_off'], signed=True)} {row['kind_name']}".strip(),
                str(row["unpredicted_over_1mb"]),
                milliseconds(row["step_predicted_s"]),
                milliseconds(row["step_xla_s"]),
                percent(row["step_off"], signed=True),
                f"{row['compile_s']:.0f} + {'-' if row['verify_s'] is None else format(row['verify_s'], '.1f')}",
            ]
        )
    return table(
        [
            "case",
            "plan",
            "peak GB",
            "compiled",
            "off",
            "sent MB",
            "compiled",
            "off",
            "worst kind off",
            "unpredicted over 1 MB",
            "step ms",
            "XLA's",
            "off",
            "XLA's compile + verify, s",
        ],
        lines,
    )


def publish(rows: Sequence[Row], about: str, page: Path = ACCURACY) -> None:
    """Write the summary between the markers of a page; adds the section and markers if they are missing.

    Args:
        about: a sentence that says what was measured, with what.
    """
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n## h100-sxm, against the programs that XLA compiles\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n{about}\n\n{summary(rows)}\n{END}{after}", encoding="utf-8")


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in rows)


def percent(value: float | None, signed: bool = False) -> str:
    """
    >>> percent(0.1234), percent(-0.02, signed=True), percent(None)
    ('12.3 %', '-2.0 %', '-')
    """
    return "-" if value is None else f"{100 * value:{'+' if signed else ''}.1f} %"


def gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.2f}"


def _worst_text(rows: Iterable[Row], name: str) -> str:
    row = worst(rows, name)
    return "-" if row is None else f"{percent(row[name], signed=True)} ({row['case']})"


def _num_pairs(actual: Sequence[float], same: float = SAME_S) -> int:
    return sum(abs(a - b) > same * max(a, b) for a, b in combinations(actual, 2))


def _by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found
