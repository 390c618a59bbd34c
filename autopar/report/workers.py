"""Report on data-parallel workers: what a policy is predicted to cost, and staleness, waiting and bytes of each worker of a run.

In: a `WorkersPlan`, figures of a run. Out: `WorkersReport`, which prints as text and as JSON; `WorkersExplanation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from autopar.plans.workers_plan import WorkersPlan
from autopar.system.text_tables import inset, new_table, plain_text
from autopar.system.units import human_bytes, human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """What one worker has done.

    Args:
        clock: the number of clocks that it has finished; None after it left.
        staleness: how often it read weights with the slowest worker how many clocks behind.
        waited_s: seconds for which its pulls waited for other workers.
    """

    clock: int | None
    staleness: Mapping[int, int]
    waited_s: float
    pulled_bytes: int
    pushed_bytes: int

    @property
    def num_reads(self) -> int:
        return sum(self.staleness.values())

    @property
    def mean_staleness(self) -> float:
        """In clocks; 0 without reads."""
        return sum(value * count for value, count in self.staleness.items()) / max(self.num_reads, 1)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorkersReport:
    """A run of workers. It prints as plain text.

    Args:
        policy: the name of the consistency policy.
        num_versions: the number of updates of the state.
        num_discarded: the number of workers' updates that the policy discarded.
        bound: the most clocks by which a read may be stale under the policy; None if there is no bound.
        plan: the plan that they ran by.
    """

    program: str
    policy: str
    num_versions: int
    num_discarded: int
    bound: int | None
    workers: tuple[WorkerRow, ...]
    plan: WorkersPlan

    @property
    def most_stale(self) -> int:
        """The largest staleness of all reads."""
        return max(max(row.staleness, default=0) for row in self.workers)

    def __str__(self) -> str:
        return plain_text(lambda console: render(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types: plain seconds and bytes."""
        rows = [
            {
                "clock": row.clock,
                "staleness": {str(value): count for value, count in sorted(row.staleness.items())},
                "waited_s": row.waited_s,
                "pulled_bytes": row.pulled_bytes,
                "pushed_bytes": row.pushed_bytes,
            }
            for row in self.workers
        ]
        about = {name: getattr(self, name) for name in ("program", "policy", "num_versions", "num_discarded", "bound")}
        costs = [asdict(one) for one in self.plan.costs]
        return {"format": "autopar-workers", "version": 1, **about, "workers": rows, "costs": costs}


def render(report: WorkersReport, console: Console) -> None:
    """Print a report to a console, with styles if it supports them."""
    console.print(
        Text.assemble(
            ("Workers of ", "bold"), (report.program, "bold"), f": {len(report.workers)} under {report.policy}"
        )
    )
    bound = "without a bound" if report.bound is None else f"at most {report.bound} allowed"
    console.print(
        Text(
            f"{report.num_versions} updates applied, {report.num_discarded} discarded; staleness at most"
            f" {report.most_stale} ({bound})\n"
        )
    )
    names = ("worker", "reads", "staleness, mean", "at most", "waited", "pulled", "pushed")
    table = new_table(*names, right=names[1:])
    for worker, row in enumerate(report.workers):
        table.add_row(
            str(worker),
            str(row.num_reads),
            f"{row.mean_staleness:.1f}",
            str(max(row.staleness, default=0)),
            human_seconds(row.waited_s),
            human_bytes(row.pulled_bytes),
            human_bytes(row.pushed_bytes),
        )
    console.print(inset(table))
    console.print(Text(), *_costs(report.plan), sep="\n")


@dataclass(frozen=True, slots=True, repr=False)
class WorkersExplanation:
    """What a plan for workers does, and what its policy costs. It prints as plain text."""

    plan: WorkersPlan

    def __str__(self) -> str:
        return plain_text(lambda console: _render_plan(self.plan, console))

    __repr__ = __str__


def _render_plan(plan: WorkersPlan, console: Console) -> None:
    devices = f"{plan.devices_per_worker} x {plan.hardware}"
    console.print(
        Text.assemble(
            ("Plan of ", "bold"),
            (plan.program, "bold"),
            f": {plan.num_workers} workers on {devices} each, under {plan.policy}\n",
        )
    )
    for name, part in plan.parts.items():
        console.print(Text(f"{name}: {human_seconds(part.prediction.step_time_s)}; {part.strategy}"))
    console.print(Text(), *_costs(plan), sep="\n")


def _costs(plan: WorkersPlan) -> list[RenderableType]:
    iterations = "in each iteration" if plan.period == 1 else f"once in {plan.period} iterations"
    table = new_table(*COST_HEADINGS, right=COST_HEADINGS[1:])
    for row in cost_rows(plan):
        table.add_row(*row)
    return [
        Text("What the policy costs, predicted", "bold"),
        Text(
            f"A worker pulls {human_bytes(plan.pulled_bytes)} and pushes {human_bytes(plan.pushed_bytes)} {iterations};"
            f" {human_bytes(plan.server_bytes)} pass through the server for all. A pull or push takes"
            f" {human_seconds(plan.message_s)}. Simulated with one worker, drawn again for each iteration, that takes longer by a factor:"
        ),
        Text(),
        inset(table),
    ]


COST_HEADINGS = ("policy", "factor", "batches/s", "waiting", "staleness at most", "discarded")


def cost_rows(plan: WorkersPlan) -> list[tuple[str, ...]]:
    """The rows of the table of costs, as text."""
    return [
        (
            one.policy,
            f"{one.straggler:g}",
            f"{one.batches_per_s:,.0f}" if one.batches_per_s >= 100 else f"{one.batches_per_s:.3g}",
            f"{100 * one.waiting:.0f} %",
            str(one.most_stale),
            f"{100 * one.discarded:.0f} %" if one.discarded else "-",
        )
        for one in plan.costs
    ]
