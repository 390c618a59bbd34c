"""Draw a run of data-parallel workers: a histogram of each worker's staleness, what it has done, and what the policy costs.

In: `WorkersReport`, `WorkersPlan`. Out: elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.plans.workers_plan import WorkersPlan
from autopar.report.html.markup import Child, Element, el, in_code, percent
from autopar.report.html.tables import cell, table
from autopar.report.workers import COST_HEADINGS, WorkersReport, cost_rows
from autopar.system.text_tables import share_text
from autopar.system.units import human_bytes, human_seconds

#: More values of staleness are drawn as ranges.
_MOST_COLUMNS = 8


def run_cards(report: WorkersReport) -> list[tuple[str, str, str]]:
    """Name, value and remark of the figures at the head of the page."""
    bound = "the policy has no bound" if report.bound is None else f"the policy allows {report.bound}"
    waited = max(row.waited_s for row in report.workers)
    return [
        ("updates applied", str(report.num_versions), f"{report.num_discarded} pushes discarded"),
        ("staleness", f"at most {report.most_stale}", bound),
        ("waited", human_seconds(waited), "by the worker that waited longest"),
        ("pushed", human_bytes(sum(row.pushed_bytes for row in report.workers)), "by all workers"),
    ]


def plan_cards(plan: WorkersPlan) -> list[tuple[str, str, str]]:
    """As `run_cards`, for a plan."""
    return [
        ("worker", human_seconds(plan.worker_s), "an iteration, by the cost model"),
        ("update", human_seconds(plan.update_s), "on the server, by the cost model"),
        ("pull or push", human_seconds(plan.message_s), "if all workers share the server's link"),
        ("through the server", human_bytes(plan.server_bytes), "in a clock of all workers"),
    ]


def histograms(report: WorkersReport) -> Element:
    """For each worker, how often it read weights with the slowest worker how many clocks behind."""
    ranges = _ranges(max(report.most_stale, report.bound or 0))
    rows = [_histogram(n, row.staleness, row.mean_staleness, ranges) for n, row in enumerate(report.workers)]
    return el("div", *rows, class_="histograms")


def _ranges(most: int) -> list[range]:
    """Ranges of staleness, of equal width."""
    width = -(-(most + 1) // _MOST_COLUMNS)
    return [range(first, first + width) for first in range(0, most + 1, width)]


def _histogram(worker: int, staleness: Mapping[int, int], mean: float, ranges: Sequence[range]) -> Element:
    total = sum(staleness.values())
    columns: list[Child] = []
    for values in ranges:
        count = sum(staleness.get(value, 0) for value in values)
        name = f"{values.start}" if len(values) == 1 else f"{values.start}-{values.stop - 1}"
        about = f"{count} of {total} reads with the slowest worker {name} clocks behind"
        column = el("span", el("i", style=f"height:{percent(count, total)}"), class_="column")
        share = share_text(count, total) if count else ""
        columns.append(el("span", el("small", share), column, el("small", name), class_="bin", title=about))
    title = el("h3", f"worker {worker}", el("small", f" {total} reads, mean {mean:.1f}"))
    about = f"Staleness of worker {worker}: mean {mean:.1f} clocks"
    return el("div", title, el("div", *columns, class_="bins", role="img", aria_label=about))


def workers_table(report: WorkersReport) -> Element:
    """What each worker has done."""
    heads = ("", "reads", "staleness, mean", "at most", "waited", "pulled", "pushed")
    rows = [
        el(
            "tr",
            cell(f"worker {worker}"),
            cell(str(row.num_reads), value=row.num_reads),
            cell(f"{row.mean_staleness:.1f}", value=row.mean_staleness),
            cell(str(max(row.staleness, default=0)), value=max(row.staleness, default=0)),
            cell(human_seconds(row.waited_s), value=row.waited_s),
            cell(human_bytes(row.pulled_bytes), value=row.pulled_bytes),
            cell(human_bytes(row.pushed_bytes), value=row.pushed_bytes),
        )
        for worker, row in enumerate(report.workers)
    ]
    return table(heads, rows, numbers=heads[1:], name="Workers")


def costs_view(plan: WorkersPlan) -> Element:
    """What the policy costs, next to others."""
    iterations = "in each iteration" if plan.period == 1 else f"once in {plan.period} iterations"
    about = (
        f"A worker pulls {human_bytes(plan.pulled_bytes)} and pushes {human_bytes(plan.pushed_bytes)} {iterations}. The table is a"
        " simulation in which one worker, drawn again for each iteration, takes longer by a factor."
    )
    rows = []
    for one, texts in zip(plan.costs, cost_rows(plan), strict=True):
        values = (one.straggler, one.batches_per_s, one.waiting, one.most_stale, one.discarded)
        cells = [cell(text, value=value) for text, value in zip(texts[1:], values, strict=True)]
        rows.append(el("tr", cell(texts[0]), *cells))
    return el(
        "div", el("p", about, class_="about"), table(COST_HEADINGS, rows, numbers=COST_HEADINGS[1:], name="Costs")
    )


def parts_table(plan: WorkersPlan) -> Element:
    """The plans of the parts."""
    rows = [
        el(
            "tr",
            cell(name),
            cell(human_seconds(part.prediction.step_time_s), value=part.prediction.step_time_s),
            cell(human_bytes(part.prediction.peak_bytes), value=part.prediction.peak_bytes),
            cell(*in_code(part.strategy)),
        )
        for name, part in plan.parts.items()
    ]
    heads = ("part", "time", "peak memory", "strategy")
    return table(heads, rows, numbers=heads[1:3], name="Parts")
