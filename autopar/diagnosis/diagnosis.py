"""What `diagnose` found of a step sharded by hand: what it costs, what nobody meant, what to change.

In: figures, rows of collectives and changes. Out: `Diagnosis`, a value that prints as text and as JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.diagnosis.compiled_costs import Cost
from autopar.diagnosis.rows import Place, TensorChange
from autopar.diagnosis.unintended_collectives import Extra
from autopar.ir.mesh import MeshShape
from autopar.plans.plan import Plan
from autopar.system.text_tables import plain_text, short_source
from autopar.system.units import human_bytes, human_seconds

#: Rows shown of collectives that nobody meant, and of the places of a change; the JSON has all.
MAX_ROWS, MAX_PLACES = 12, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, to be made after those before it.

    Args:
        kind: `constraints`: every sharding stays, and the values inside are constrained as a plan says; `shardings`:
            tensors are split otherwise.
        tensors: of the second kind. places: of the first, where it matters most.
        gain_s: what it takes off the predicted step time. xla_gain_s: off XLA's estimate; None where there is none.
        after: the program with this change and those before it.
    """

    kind: Literal["constraints", "shardings"]
    words: str
    tensors: tuple[TensorChange, ...]
    places: tuple[Place, ...]
    gain_s: float
    xla_gain_s: float | None
    after: Cost


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """A step as it is, beside autopar's plan for the same mesh. Printed, it is plain text.

    Args:
        as_is: the program as its user wrote it.
        best: autopar's plan. plan: that plan.
        kept: what the shardings of its inputs come to, with all values inside split as is best for them.
        extras: what XLA's program sends that this does not account for, the longest first.
        changes: in order; the last one's `after` has all of them.
        changed: the plan with all changes, which `parallelize(step, plan=...)` runs.
        topology: `slices x hosts x GPUs` that it was compiled for.
        budget_bytes: what a device may hold.
    """

    program: str
    mesh: MeshShape
    hardware: str
    topology: str
    budget_bytes: float
    as_is: Cost
    kept: Cost
    best: Cost
    plan: Plan
    extras: tuple[Extra, ...]
    changes: tuple[Change, ...]
    changed: Plan
    notes: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def unmeant(self) -> tuple[Extra, ...]:
        """Of the extras, those that only move values: nobody meant them, XLA's partitioner put them in."""
        return tuple(row for row in self.extras if not row.is_sum)

    @property
    def sums(self) -> tuple[Extra, ...]:
        """Of the extras, sums over devices: they follow from the shardings as XLA spreads them over the step, but
        another split of the values inside needs none, or smaller ones."""
        return tuple(row for row in self.extras if row.is_sum)

    @property
    def by_xla(self) -> bool:
        """Whether XLA's estimates are what is compared; else autopar's predictions."""
        return None not in (self.as_is.xla_s, self.best.xla_s, *(change.after.xla_s for change in self.changes))

    def seconds(self, cost: Cost) -> float:
        """A step's, by what is compared."""
        xla_s = cost.xla_s
        return xla_s if self.by_xla and xla_s is not None else cost.predicted_s

    @property
    def difference_s(self) -> float:
        """What a step takes longer as it is than by autopar's plan; below zero where the hand has won."""
        return self.seconds(self.as_is) - self.seconds(self.best)

    @property
    def recovered(self) -> float:
        """The part of the difference that the changes recover."""
        return self._recovered(self.seconds)

    @property
    def recovered_as_predicted(self) -> float:
        """The same by autopar's predictions, which the changes were searched for by."""
        return self._recovered(lambda cost: cost.predicted_s)

    def _recovered(self, seconds: Callable[[Cost], float]) -> float:
        difference = seconds(self.as_is) - seconds(self.best)
        if difference <= 0 or not self.changes:
            return 0.0
        return (seconds(self.as_is) - seconds(self.changes[-1].after)) / difference

    def __str__(self) -> str:
        return plain_text(lambda console: render_diagnosis(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types: plain seconds and bytes. The plans are left out."""
        return {
            "format": "autopar-diagnosis",
            "version": 1,
            "program": self.program,
            "hardware": self.hardware,
            "mesh": self.mesh.size_of,
            "topology": self.topology,
            "memory_budget_bytes": self.budget_bytes,
            "compared_by": "xla" if self.by_xla else "prediction",
            "as_is": asdict(self.as_is),
            "kept": asdict(self.kept),
            "best": asdict(self.best) | {"strategy": self.plan.words},
            "difference_s": self.difference_s,
            "recovered": self.recovered,
            "recovered_as_predicted": self.recovered_as_predicted,
            "unmeant": [asdict(row) for row in self.unmeant],
            "sums": [asdict(row) for row in self.sums],
            "changes": [asdict(change) for change in self.changes],
            "notes": list(self.notes),
            "xla_flags": list(self.flags),
        }


# -- as text ---------------------------------------------------------------------------------


def render_diagnosis(told: Diagnosis, console: Console) -> None:
    """Print a diagnosis to a console, with styles where it has them."""
    console.print(Text.assemble(("Diagnosis of ", "bold"), (told.program, "bold"), f": {_verdict(told)}"))
    console.print(
        Text(f"sharded by hand over mesh {told.mesh.describe()}; {told.hardware}, topology {told.topology}\n")
    )
    console.print(_costs(told))
    console.print(Text(f"Collectives nobody meant: {_total(told.unmeant)}", "bold"), _extras(told.unmeant))
    if told.sums:
        head = f"Sums that another split of the values inside does not need: {_total(told.sums)}"
        console.print(Text(head, "bold"), _extras(told.sums))
    if told.changes:
        also = f", {100 * told.recovered_as_predicted:.0f} % as predicted" if told.by_xla else ""
        console.print(Text(f"Changes that recover {100 * told.recovered:.0f} % of the difference{also}", "bold"))
        console.print(_changes(told))
    for note in told.notes:
        console.print(Padding(Text(f"note: {note}"), (0, 0, 0, 2)))


def _verdict(told: Diagnosis) -> str:
    as_is, best = told.seconds(told.as_is), told.seconds(told.best)
    whose = "by XLA's estimate" if told.by_xla else "as predicted"
    if told.difference_s <= 0:
        return f"{human_seconds(as_is)} a step {whose}, no slower than autopar's plan ({human_seconds(best)})"
    return f"{human_seconds(as_is)} a step {whose}, {human_seconds(best)} by autopar's plan ({as_is / best:.2f}x)"


def _costs(told: Diagnosis) -> RenderableType:
    table = _table("", "step", "XLA's estimate", "sends", "peak", "collectives compiled")
    rows = [("as it is", told.as_is), ("with these shardings at best", told.kept)]
    rows += [("autopar's plan", told.best)]
    for name, cost in rows:
        made = cost.compiled
        peak = cost.predicted_peak_bytes if made is None else made.peak_bytes
        over = " over" if peak > told.budget_bytes else ""
        table.add_row(
            Text(name),
            human_seconds(cost.predicted_s),
            "-" if cost.xla_s is None else human_seconds(cost.xla_s),
            "-" if made is None else human_bytes(made.sent_bytes),
            f"{human_bytes(peak)}{over}",
            Text("-" if made is None else _counts(made.counts)),
        )
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(Text(f"autopar's plan: {told.plan.words}"))
    exposed = told.as_is.compiled.exposed_s if told.as_is.compiled else {}
    if exposed:
        each = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in exposed.items())
        grid.add_row(Text(f"as it is, hidden by no kernel, says XLA: {each}"))
    return Padding(grid, (0, 0, 1, 2))


def _extras(rows: Sequence[Extra]) -> RenderableType:
    table = _table("collective", "times", "sends", "takes", "where")
    for row in rows[:MAX_ROWS]:
        lines = dict.fromkeys((row.path, short_source(row.library_source), short_source(row.source)))
        table.add_row(
            Text(row.name),
            str(row.count),
            human_bytes(row.num_bytes),
            human_seconds(row.time_s),
            Text("\n".join(filter(None, lines))),
        )
    if len(rows) > MAX_ROWS:
        table.add_row(Text(f"and {len(rows) - MAX_ROWS} more; --json has all"))
    return Padding(table, (0, 0, 1, 2)) if rows else Text()


def _changes(told: Diagnosis) -> RenderableType:
    grid = Table.grid(padding=(0, 0, 1, 0))
    for number, change in enumerate(told.changes, 1):
        gain = change.xla_gain_s if told.by_xla and change.xla_gain_s is not None else change.gain_s
        head = f"{number}. {'-' if gain >= 0 else '+'}{human_seconds(abs(gain))}: {change.words}"
        rows = Table.grid()
        rows.add_row(Text(head))
        for one in (*_tensor_lines(change.tensors), *_place_lines(change.places), _after(change.after)):
            rows.add_row(Padding(Text(one), (0, 0, 0, 3)))
        grid.add_row(rows)
    return Padding(grid, (0, 0, 0, 2))


def _tensor_lines(tensors: Sequence[TensorChange]) -> list[str]:
    """The step's own, then how many of the optimizer's go with them."""
    lines = [
        f"{one.path}{f' x{one.count}' if one.count > 1 else ''}: {one.before or 'unsaid'} -> {one.after}"
        for one in tensors
        if one.role != "optimizer"
    ]
    others = [one for one in tensors if one.role == "optimizer"]
    if others and lines:
        return [*lines, f"and {sum(one.count for one in others)} tensors of the optimizer's state likewise"]
    return lines + [f"{one.path} x{one.count}: {one.before or 'unsaid'} -> {one.after}" for one in others]


def _place_lines(places: Sequence[Place]) -> list[str]:
    lines = []
    for one in places[:MAX_PLACES]:
        times = f" x{one.count}" if one.count > 1 else ""
        lines.append(f"{one.path}, {one.phase} {one.primitive}{times}: {list(one.shape)} -> {one.sharding}")
    return lines + ([f"and {len(places) - MAX_PLACES} more; --json has all"] if len(places) > MAX_PLACES else [])


def _after(cost: Cost) -> str:
    made = cost.compiled
    if made is None:
        return f"then {human_seconds(cost.predicted_s)} a step, predicted; not compiled"
    xla = "" if made.step_time_s is None else f", {human_seconds(made.step_time_s)} by XLA's estimate"
    left = _counts(made.unmeant_counts) if made.unmeant_bytes else "none"
    return (
        f"then {human_seconds(cost.predicted_s)} a step{xla}; compiled: sends {human_bytes(made.sent_bytes)}, peak"
        f" {human_bytes(made.peak_bytes)}, nobody meant: {left}"
    )


def _total(rows: Sequence[Extra]) -> str:
    if not rows:
        return "none"
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.kind] += row.count
    size, seconds = sum(row.num_bytes for row in rows), sum(row.time_s for row in rows)
    return f"{_counts(counts)}; {human_bytes(size)} a device, {human_seconds(seconds)} one after the other"


def _counts(counts: Mapping[str, int]) -> str:
    each = sorted(counts.items(), key=lambda one: -one[1])
    return ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in each if count) or "none"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in columns:
        right = name in ("step", "XLA's estimate", "sends", "peak", "times", "takes")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
