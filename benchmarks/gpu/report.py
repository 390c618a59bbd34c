"""Render a page of the GPU measurements: predicted, XLA's estimate, measured and errors, for each card.

In: records. Out: Markdown. The newest record of each piece counts; a piece that only failed shows its error.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu import records
from benchmarks.gpu.pieces import PIECES
from benchmarks.gpu.setting import Record
from benchmarks.proof_summary import table

_HEAD = """# Measured on GPUs

What `python -m benchmarks.gpu` measured, rendered by `python -m benchmarks.gpu report`. An error is a figure over what was
measured, less 1: below 0, the step took longer than predicted."""
_IN_A_ROW = """*Measured* is the time per step of steps in a row, as in a training loop: the host dispatches a step while the one
before runs. Errors are against it. *Waited for* is the median time of a step from its call until its results are ready,
when the next one is called: it includes the host's time to dispatch the step. *Kernels* is the time in which a kernel runs.
*Plain `jit`* is in a row, too."""
_NOTHING = "No GPU has been measured yet."

Rows = Sequence[Mapping[str, Any]]


def page(found: list[Record]) -> str:
    """Everything, card by card."""
    newest = records.newest([record for record in found if record["piece"] in PIECES])
    cards = sorted({of[1:] for of in newest})
    parts = [_HEAD] if cards else [_HEAD, _NOTHING]
    for card in cards:
        parts += _card({of[0]: record for of, record in newest.items() if of[1:] == card})
    return "\n\n".join(parts) + "\n"


def _card(by_piece: dict[str, Record]) -> list[str]:
    host = max((record["host"] for record in by_piece.values()), key=lambda each: each["date"])
    found = {name: by_piece[name]["found"] for name in PIECES if "found" in by_piece.get(name, {})}
    failed, in_part = (
        [{"piece": name, "reason": _last(record[key])} for name, record in by_piece.items() if key in record]
        for key in ("error", "partial")
    )
    of = {part: {k.partition("/")[2]: v for k, v in found.items() if k.startswith(f"{part}/")} for part in _PARTS}
    return [
        f"## {host['num_devices']} x {host['card']}",
        _made_on(host),
        *(_calibration(found["calibration"]) if "calibration" in found else []),
        *(text for part, render in _PARTS.items() if of[part] for text in render(of[part])),
        *(["### Measured in part", _table(in_part)] if in_part else []),
        *(["### Failed", _table(failed)] if failed else []),
    ]


def _made_on(host: Record) -> str:
    driver = ", ".join(f"{key} {value}" for key, value in host["driver"].items()) or "no NVIDIA driver"
    versions = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    machine = host["machine"]
    return (
        f"{host['date']}; {driver}; {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB; {versions}."
    )


# -- calibration ---------------------------------------------------------------------------------


def _calibration(found: Record) -> list[str]:
    constants = [
        {
            "constant": row["constant"],
            "profile": row["profile"],
            "measured": row["measured"],
            "off by": _off(row["ratio"]),
        }
        for row in found["constants"]
    ]
    fits = [
        {
            "fit": fit["group"],
            "samples": fit["num_samples"],
            "mean error": _percent(fit["mean_error"]),
            "error as priced": _percent(found["mean_error_as_priced"].get(fit["group"])),
            **{term: _rate(term, each) for term, each in fit["seconds_per"].items()},
        }
        for fit in found["fits"]
    ]
    return [
        f"### Constants of the profile `{found['base']}`",
        _table(constants),
        "### Fits of the calibration",
        "The error of a fit is of samples that it had not seen; *as priced* is that of the cost model's formulas.",
        _table(fits),
        *_skipped(found["skipped"]),
    ]


def _skipped(skipped: Rows) -> list[str]:
    reasons = sorted({(each["group"], each["reason"]) for each in skipped})
    return [f"Not timed: {'; '.join(f'{group}: {reason}' for group, reason in reasons)}."] if reasons else []


def _rate(term: str, seconds: float) -> str:
    if term not in ("flops", "bytes"):
        return f"{seconds * 1e6:.3g} us"
    unit = {"flops": "TFLOP/s", "bytes": "TB/s"}[term]
    return f"{1e-12 / seconds:.4g} {unit}" if seconds > 0 else "no time"


def _off(ratio: float | None) -> str:
    """The measured value's deviation from the profile's."""
    return "" if ratio is None else f"{ratio - 1:+.0%}"


# -- the other parts -----------------------------------------------------------------------------


def _train(by_model: dict[str, Record]) -> list[str]:
    rows = [
        {
            "model": name,
            "predicted": _ms(one["predicted_s"]),
            "XLA's estimate": _ms(_estimate(one)),
            "measured": _ms(one["in_a_row_s"]),
            "error": _error(one["predicted_s"], one["in_a_row_s"]),
            "XLA's error": _error(_estimate(one), one["in_a_row_s"]),
            "waited for": _ms(one["median_s"]),
            "kernels": _ms(one.get("profile", {}).get("busy_s")),
            "plain `jit`": _in_a_row(one.get("jit", {})),
            "peak, predicted": _gb(one["predicted_peak_bytes"]),
            "peak, measured": _gb(one.get("peak_bytes")),
            "of the card's peak": _percent(one.get("utilisation")),
            "plan of": one["plan_of"],
        }
        for name, one in by_model.items()
    ]
    errors = [abs(one["predicted_s"] / one["in_a_row_s"] - 1) for one in by_model.values()]
    by_family = [
        {"model": name, **{kind: _ms(seconds) for kind, seconds in one["profile"]["families"].items()}}
        for name, one in by_model.items()
        if "profile" in one
    ]
    return [
        "### Train steps on one GPU",
        f"Median error of the prediction: {statistics.median(errors):.0%} of {len(errors)} steps.",
        _IN_A_ROW,
        _table(rows),
        "Time in kernels, by what they compute:",
        _table(by_family),
    ]


def _in_a_row(one: Record) -> str:
    """Milliseconds per step, or the error in their place."""
    return _ms(one.get("in_a_row_s")) or _last(one.get("error", ""))


def _estimate(one: Record) -> float | None:
    return (one["xla"] or {}).get("step_s")


def _inference(by_part: dict[str, Record]) -> list[str]:
    return _tables("Inference", by_part)


def _attention(by_part: dict[str, Record]) -> list[str]:
    return _tables("Attention: errors against float32, as norms, and seconds of both passes", by_part)


def _search(by_kind: dict[str, Record]) -> list[str]:
    rows: list[dict[str, Any]] = []
    for kind, one in by_kind.items():
        for library, each in {"autopar": one, "cuVS": one["cuvs"]}.items():
            if each:
                speeds = {f"batch {row['batch']}": f"{row['queries_per_s']:.4g}/s" for row in each["rows"]}
                about = {"index": kind, "by": library, "vectors": one["vectors"]}
                rows.append(
                    about | {"built in": f"{each['build_s']:.1f} s", "recall": f"{each['recall']:.4f}"} | speeds
                )
    return ["### Vector search: queries per second by batch", _table(rows)]


def _several(by_model: dict[str, Record]) -> list[str]:
    rows = [
        {
            "model": name,
            "GPUs": one["num_gpus"],
            "way": row["way"],
            "measured": _in_a_row(row),
            "predicted": _ms(one["predicted_s"]) if row["way"] == "autopar" else "",
            "to autopar": _against(row, one["rows"][0]),
        }
        for name, one in by_model.items()
        for row in one["rows"]
    ]
    return ["### Train steps on all GPUs", _table(rows)]


def _against(row: Record, first: Record) -> str:
    return f"{row['in_a_row_s'] / first['in_a_row_s']:.2f}x" if "in_a_row_s" in row and "in_a_row_s" in first else ""


#: Prefix of a piece's name -> the function that renders its records.
_PARTS: dict[str, Callable[[dict[str, Record]], list[str]]] = {
    "train": _train,
    "attention": _attention,
    "inference": _inference,
    "search": _search,
    "several": _several,
}


# -- cells ---------------------------------------------------------------------------------------


def _tables(title: str, by_part: dict[str, Record]) -> list[str]:
    parts = [f"### {title}"]
    for name, one in by_part.items():
        alone = [f"{key}: {_cell(value)}" for key, value in one.items() if key != "rows"]
        parts += [f"**{name}** {'; '.join(alone)}".strip(), _table(one["rows"])]
    return parts


def _table(rows: Rows) -> str:
    """All columns of all rows, in order of first appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return table(columns, [[_cell(row.get(column, "")) for column in columns] for row in rows])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _last(text: str) -> str:
    """The last line of an error, which names it."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.4g} ms"


def _gb(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e9:.3g} GB"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _error(said: float | None, measured: float) -> str:
    return "" if said is None else f"{said / measured - 1:+.0%}"
