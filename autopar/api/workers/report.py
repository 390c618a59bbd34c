"""Report on a run of data-parallel workers: versions, staleness, waiting and bytes of each worker.

In: a store's report. Out: `WorkersReport`, which prints as text and as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.system.text_tables import inset, new_table, plain_text
from autopar.system.units import human_bytes, human_seconds
from autopar.versions.consistency.policy import Policy, of_all
from autopar.versions.store_values import StoreReport


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
    """

    program: str
    policy: str
    num_versions: int
    num_discarded: int
    bound: int | None
    workers: tuple[WorkerRow, ...]

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
        return {"format": "autopar-workers", "version": 1, **about, "workers": rows}


def report_of(program: str, policy: Policy, store: StoreReport) -> WorkersReport:
    """The report on a store's workers."""
    is_bound = math.isfinite(policy.bound) and policy.complete is of_all
    rows = [
        WorkerRow(
            clock=clock,
            staleness=dict(sorted(store.staleness[worker].items())),
            waited_s=store.waits_s[worker],
            pulled_bytes=sum(one.pulled_bytes for (who, _), one in store.traffic.items() if who == worker),
            pushed_bytes=sum(one.pushed_bytes for (who, _), one in store.traffic.items() if who == worker),
        )
        for worker, clock in enumerate(store.clocks)
    ]
    return WorkersReport(
        program=program,
        policy=policy.name,
        num_versions=max(store.versions),
        num_discarded=store.num_discarded,
        bound=int(policy.bound) if is_bound else None,
        workers=tuple(rows),
    )


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
