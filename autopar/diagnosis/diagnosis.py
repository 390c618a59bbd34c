"""Represent and print the result of `diagnose`: the cost of a hand-sharded step, unintended collectives, changes.

In: costs, rows of collectives, changes. Out: `Diagnosis`, which prints as text and as JSON.
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

#: Most rows printed of extra collectives, and of the places of a change; the JSON has all.
MAX_ROWS, MAX_PLACES = 12, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, on top of all earlier ones.

    Args:
        kind: `constraints`: input shardings stay, and intermediate values are constrained to a plan's shardings;
            `shardings`: input shardings change.
        description: what changes, in one sentence.
        tensors: changed inputs, of kind `shardings`.
        places: constrained values where it matters most, of kind `constraints`.
        gain_s: seconds saved of the predicted step time.
        replayed_gain_s: seconds saved of the replayed step; None where there is none.
        after: cost of the program with this and all earlier changes.
    """

    kind: Literal["constraints", "shardings"]
    description: str
    tensors: tuple[TensorChange, ...]
    places: tuple[Place, ...]
    gain_s: float
    replayed_gain_s: float | None
    after: Cost


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """A hand-sharded step compared with autopar's plan for the same mesh. It prints as plain text.

    Args:
        topology: XLA's `slices x hosts per slice x GPUs per host` of the target; a slice is an NVLink domain.
        budget_bytes: memory budget per device.
        as_is: cost of the user's program.
        kept: predicted cost of the best plan with the user's input shardings.
        best: cost of autopar's plan.
        plan: autopar's plan.
        extras: compiled collectives of the user's program that `kept` does not need, the longest first.
        changes: changes in order; `after` of the last one is the cost with all changes.
        changed: the plan with all changes, for `parallelize(step, plan=...)`.
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
    def unintended(self) -> tuple[Extra, ...]:
        """The unintended collectives: extras that only move data, which XLA's SPMD partitioner inserted."""
        return tuple(row for row in self.extras if not row.is_sum)

    @property
    def sums(self) -> tuple[Extra, ...]:
        """The extra reductions, which other shardings of intermediate values than XLA's would avoid or shrink."""
        return tuple(row for row in self.extras if row.is_sum)

    @property
    def by_replay(self) -> bool:
        """Whether the comparison goes by the replay of the compiled programs; otherwise, by autopar's predictions."""
        return None not in (
            self.as_is.replayed_s,
            self.best.replayed_s,
            *(change.after.replayed_s for change in self.changes),
        )

    def seconds(self, cost: Cost) -> float:
        """The step time of a cost, by the replay or by prediction (`by_replay`)."""
        replayed_s = cost.replayed_s
        return replayed_s if self.by_replay and replayed_s is not None else cost.predicted_s

    @property
    def difference_s(self) -> float:
        """Step time of the user's program minus that of autopar's plan; negative where the user's is faster."""
        return self.seconds(self.as_is) - self.seconds(self.best)

    @property
    def recovered(self) -> float:
        """The fraction of the difference that the changes recover."""
        return self._recovered(self.seconds)

    @property
    def recovered_as_predicted(self) -> float:
        """The recovered fraction by autopar's predictions, on which the search for changes is based."""
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
        """Everything but the plans, as JSON types, in seconds and bytes."""
        return {
            "format": "autopar-diagnosis",
            "version": 1,
            "program": self.program,
            "hardware": self.hardware,
            "mesh": self.mesh.size_of,
            "topology": self.topology,
            "memory_budget_bytes": self.budget_bytes,
            "compared_by": "replay" if self.by_replay else "prediction",
            "as_is": asdict(self.as_is),
            "kept": asdict(self.kept),
            "best": asdict(self.best) | {"strategy": self.plan.strategy},
            "difference_s": self.difference_s,
            "recovered": self.recovered,
            "recovered_as_predicted": self.recovered_as_predicted,
            "unintended": [asdict(row) for row in self.unintended],
            "sums": [asdict(row) for row in self.sums],
            "changes": [asdict(change) for change in self.changes],
            "notes": list(self.notes),
            "xla_flags": list(self.flags),
        }


# -- as text ---------------------------------------------------------------------------------


def render_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis to a console, with styles where it has them."""
    console.print(Text.assemble(("Diagnosis of ", "bold"), (diagnosis.program, "bold"), f": {_verdict(diagnosis)}"))
    console.print(
        Text(
            f"sharded by hand over mesh {diagnosis.mesh.describe()}; {diagnosis.hardware}, topology {diagnosis.topology}\n"
        )
    )
    console.print(_costs(diagnosis))
    console.print(
        Text(f"Unintended collectives: {_total(diagnosis.unintended)}", "bold"), _extras(diagnosis.unintended)
    )
    if diagnosis.sums:
        head = f"Reductions that other shardings of intermediate values would avoid: {_total(diagnosis.sums)}"
        console.print(Text(head, "bold"), _extras(diagnosis.sums))
    if diagnosis.changes:
        also = f", {100 * diagnosis.recovered_as_predicted:.0f} % as predicted" if diagnosis.by_replay else ""
        console.print(Text(f"Changes that recover {100 * diagnosis.recovered:.0f} % of the difference{also}", "bold"))
        console.print(_changes(diagnosis))
    for note in diagnosis.notes:
        console.print(Padding(Text(f"note: {note}"), (0, 0, 0, 2)))


def _verdict(diagnosis: Diagnosis) -> str:
    as_is, best = diagnosis.seconds(diagnosis.as_is), diagnosis.seconds(diagnosis.best)
    whose = "replayed" if diagnosis.by_replay else "as predicted"
    if diagnosis.difference_s <= 0:
        return f"{human_seconds(as_is)} a step {whose}, no slower than autopar's plan ({human_seconds(best)})"
    ratio = f" ({as_is / best:.2f}x)" if best else ""
    return f"{human_seconds(as_is)} a step {whose}, {human_seconds(best)} by autopar's plan{ratio}"


def _costs(diagnosis: Diagnosis) -> RenderableType:
    table = _table("", "predicted", "replayed", "sends", "peak", "collectives compiled")
    rows = [("as it is", diagnosis.as_is), ("with these shardings at best", diagnosis.kept)]
    rows += [("autopar's plan", diagnosis.best)]
    for name, cost in rows:
        made = cost.compiled
        peak = cost.predicted_peak_bytes if made is None else made.peak_bytes
        over = " over" if peak > diagnosis.budget_bytes else ""
        table.add_row(
            Text(name),
            human_seconds(cost.predicted_s),
            "-" if cost.replayed_s is None else human_seconds(cost.replayed_s),
            "-" if made is None else human_bytes(made.sent_bytes),
            f"{human_bytes(peak)}{over}",
            Text("-" if made is None else _counts(made.counts)),
        )
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(Text(f"autopar's plan: {diagnosis.plan.strategy}"))
    exposed = diagnosis.as_is.compiled.exposed_s if diagnosis.as_is.compiled else {}
    if exposed:
        each = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in exposed.items())
        grid.add_row(Text(f"as it is, exposed communication, replayed: {each}"))
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


def _changes(diagnosis: Diagnosis) -> RenderableType:
    grid = Table.grid(padding=(0, 0, 1, 0))
    for number, change in enumerate(diagnosis.changes, 1):
        gain = change.replayed_gain_s if diagnosis.by_replay and change.replayed_gain_s is not None else change.gain_s
        head = f"{number}. {'-' if gain >= 0 else '+'}{human_seconds(abs(gain))}: {change.description}"
        rows = Table.grid()
        rows.add_row(Text(head))
        for one in (*_tensor_lines(change.tensors), *_place_lines(change.places), _after(change.after)):
            rows.add_row(Padding(Text(one), (0, 0, 0, 3)))
        grid.add_row(rows)
    return Padding(grid, (0, 0, 0, 2))


def _tensor_lines(tensors: Sequence[TensorChange]) -> list[str]:
    """One line per changed tensor, and one line for the optimizer state that changes with them."""
    lines = [
        f"{one.path}{f' x{one.count}' if one.count > 1 else ''}: {one.before or 'unspecified'} -> {one.after}"
        for one in tensors
        if one.role != "optimizer"
    ]
    others = [one for one in tensors if one.role == "optimizer"]
    if others and lines:
        return [*lines, f"and {sum(one.count for one in others)} tensors of the optimizer's state likewise"]
    return lines + [f"{one.path} x{one.count}: {one.before or 'unspecified'} -> {one.after}" for one in others]


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
    replayed = "" if made.step_time_s is None else f", replayed {human_seconds(made.step_time_s)}"
    left = _counts(made.unintended_counts) if made.unintended_bytes else "none"
    return (
        f"then {human_seconds(cost.predicted_s)} a step{replayed}; compiled: sends {human_bytes(made.sent_bytes)}, peak"
        f" {human_bytes(made.peak_bytes)}, unintended: {left}"
    )


def _total(rows: Sequence[Extra]) -> str:
    if not rows:
        return "none"
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.kind] += row.count
    size, seconds = sum(row.num_bytes for row in rows), sum(row.time_s for row in rows)
    return f"{_counts(counts)}; {human_bytes(size)} a device, {human_seconds(seconds)} without overlap"


def _counts(counts: Mapping[str, int]) -> str:
    each = sorted(counts.items(), key=lambda one: -one[1])
    return ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in each if count) or "none"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in columns:
        right = name in ("predicted", "replayed", "sends", "peak", "times", "takes")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
