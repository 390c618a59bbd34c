"""Represent and print the result of `verify`: predicted and compiled figures side by side.

In: compared figures and collectives. Out: `Verification`, which prints as text and as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.planner.memory_budget import MARGIN
from autopar.plans.plan import Plan
from autopar.report.breakdown import PREDICTED_IS, SIMULATED
from autopar.system.text_tables import plain_text, short_source
from autopar.system.units import human_bytes, human_seconds
from autopar.verification.figures import (
    CollectiveMatch,
    Collectives,
    CompiledCollective,
    Figure,
    as_json,
    collective_name,
    names_off,
)
from autopar.verification.step_times import COLUMNS, StepTimes
from autopar.xla_compiler.compiler import CompiledStep

#: Most rows of the table of unpredicted collectives; the JSON has all.
MAX_ROWS = 16
#: Most rows of the table of compiled collectives.
FEW_ROWS = 8
#: Most kinds of operations, and notes, of the replay.
_FEW_KINDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One planning attempt of `verify`. Bytes are per device.

    Args:
        planned_for_bytes: memory limit of the attempt: the budget minus the margin, or less after an attempt whose
            compiled program exceeded the budget.
        predicted_bytes, compiled_bytes: peak memory; None where no plan fits.
        step_time_s: predicted step time.
        description: the strategy and mesh of the plan, or the reason why there is none.
    """

    planned_for_bytes: float
    predicted_bytes: float | None
    compiled_bytes: float | None
    step_time_s: float | None
    description: str


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """Predicted and compiled figures of a plan. It prints as plain text.

    Args:
        plan: the verified plan.
        topology: XLA's `slices x hosts per slice x GPUs per host` of the target; a slice is an NVLink domain.
        memory: bytes per device of arguments, temporaries, outputs, donated outputs, and the peak.
        matched: all collectives: by kind and mesh axes, and one by one with the decisions that predicted them.
        times: the step time by three models: predicted, replayed, XLA's estimate; and measured.
        step_time: the plan's prediction of the estimate by XLA's scheduler, and that estimate. Without estimator
            figures in the profile, the prediction is the plan's own step time.
        compiled: the compiled step with its HLO text.
        budget_bytes: the memory budget that the compiled peak must meet.
        attempts: all planning attempts, the verified plan among them.
        overhead_s: seconds beyond tracing, planning and XLA's compile: lowering, the worker's startup where planning
            did not hide it, transfer of the module, parsing the HLO, comparison. Printing is not included.
    """

    plan: Plan
    topology: str
    memory: tuple[Figure, ...]
    matched: Collectives
    times: StepTimes
    step_time: Figure
    compiled: CompiledStep
    budget_bytes: float
    attempts: tuple[Attempt, ...]
    overhead_s: float

    @property
    def collectives(self) -> tuple[CollectiveMatch, ...]:
        """Collectives by kind and mesh axes, the largest first."""
        return self.matched.matches

    @property
    def unpredicted(self) -> tuple[CompiledCollective, ...]:
        """Compiled collectives that no decision accounts for, the largest first."""
        return self.matched.unpredicted

    @property
    def off(self) -> tuple[str, ...]:
        """Names of the figures out of tolerance, and `memory budget` where XLA's program exceeds it."""
        names = names_off([*self.memory, *(match.figure for match in self.collectives), self.step_time])
        return names if self.fits else (*names, "memory budget")

    @property
    def fits(self) -> bool:
        """Whether XLA's program fits the memory budget."""
        return self.compiled.peak_bytes <= self.budget_bytes

    @property
    def holds(self) -> bool:
        """Whether every figure is within its tolerance."""
        return not self.off

    def __str__(self) -> str:
        return plain_text(lambda console: render_verification(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything but the HLO text, as JSON types, in seconds and bytes."""
        compiled = self.compiled
        return {
            "format": "autopar-verification",
            "version": 1,
            "program": self.plan.program.name,
            "hardware": self.plan.hardware,
            "mesh": self.plan.mesh.size_of,
            "topology": self.topology,
            "strategy": self.plan.strategy,
            "xla_flags": list(compiled.flags),
            "compile_s": compiled.compile_s,
            "overhead_s": self.overhead_s,
            "holds": self.holds,
            "off": list(self.off),
            "memory": [as_json(figure) for figure in self.memory],
            "memory_budget": {
                "bytes": self.budget_bytes,
                "margin": MARGIN,
                "holds": self.fits,
                "attempts": [asdict(attempt) for attempt in self.attempts],
            },
            "step_time": as_json(self.step_time),
            "step_times": self.times.to_json(),
            "predicted_step_time_s": self.plan.prediction.step_time_s,
            "measured": asdict(compiled.measured) if compiled.measured else None,
            "predicted_exposed_s": self.plan.prediction.xla_exposed_s,
            "exposed_s": compiled.exposed_s,
            "collectives": [{**asdict(match), "holds": match.figure.holds} for match in self.collectives],
            "compiled_collectives": [
                asdict(one) | {"predicted": [self._predicted(position) for position in one.predicted]}
                for one in self.matched.compiled
            ],
            "unpredicted": [asdict(one) for one in self.unpredicted],
            "missing": [self._predicted(position) | {"missing_bytes": rest} for position, rest in self.matched.missing],
        }

    def _predicted(self, position: int) -> dict[str, Any]:
        use = self.plan.collectives[position]
        about = {name: getattr(use, name) for name in ("kind", "axes", "num_bytes", "cause", "path", "source", "phase")}
        return {"position": position, **about}


# -- as text ---------------------------------------------------------------------------------


def render_verification(verification: Verification, console: Console) -> None:
    """Print a verification to a console, with styles where it has them."""
    plan, compiled = verification.plan, verification.compiled
    verdict = "holds" if verification.holds else f"off: {', '.join(verification.off)}"
    console.print(Text.assemble(("Verification of ", "bold"), (plan.program.name, "bold"), f": {verdict}"))
    console.print(Text(f"{plan.strategy}; mesh {plan.mesh.describe()}"))
    console.print(
        Text(
            f"compiled for {plan.hardware}, topology {verification.topology}, in {human_seconds(compiled.compile_s)}, and"
            f" {human_seconds(verification.overhead_s)} around it\n"
        )
    )
    console.print(Text("Memory, per device", "bold"), _figures(verification.memory))
    console.print(_budget(verification))
    console.print(Text("Collectives: what one device sends in a step", "bold"))
    console.print(
        _collectives(verification.collectives) if verification.collectives else Padding(Text("none\n"), (0, 0, 0, 2))
    )
    if verification.matched.compiled:
        console.print(Text("Compiled collectives, and what predicted them", "bold"), _one_by_one(verification))
    if verification.unpredicted:
        console.print(Text("Compiled, and predicted by no decision", "bold"), _unpredicted(verification.unpredicted))
    if verification.matched.missing:
        console.print(Text("Predicted, and not compiled", "bold"), _missing(verification))
    console.print(Text("Step time", "bold"), _step_times(verification))
    console.print()
    console.print(Text("XLA_FLAGS", "bold"), *(Padding(Text(flag), (0, 0, 0, 2)) for flag in compiled.flags))


def _step_times(verification: Verification) -> RenderableType:
    """The step time by three models, what they are, and where the replayed time goes."""
    times, figure = verification.times, verification.step_time
    predicted_name, replayed_name, xla_name, _ = COLUMNS
    columns = COLUMNS if times.measured_s is not None else COLUMNS[:-1]
    table = _table("", *columns)
    for name, predicted, *others in times.rows():
        shown = ["-" if number is None else human_seconds(number) for number in others[: len(columns) - 1]]
        table.add_row(Text(name), human_seconds(predicted), *shown)
    grid = Table.grid()
    grid.add_row(table)
    lines = [f"{predicted_name}: {PREDICTED_IS}"]
    if times.replay is None:
        lines.append(f"not replayed: {times.no_replay}")
    else:
        parts = ", ".join(
            f"{kind} {human_seconds(seconds)}" for kind, seconds in [*times.replay.by_kind().items()][:_FEW_KINDS]
        )
        lines.append(f"{replayed_name}: the compiled program by the device's rates, an estimate: {parts}")
        lines += [f"  {note}" for note in times.replay.notes[:_FEW_KINDS]]
    if times.estimate_errors:
        lines.append(f"{xla_name}: left out, it is wrong for {' and '.join(times.estimate_errors[:_FEW_KINDS])}")
    if figure.name == SIMULATED and figure.compiled is not None:
        tolerance = "" if figure.tolerance is None else f", tolerance {100 * figure.tolerance:g} %"
        both = f"{human_seconds(figure.predicted)}, {human_seconds(figure.compiled)} by XLA ({_off(figure)}{tolerance})"
        lines.append(f"{SIMULATED}: {both}{'' if figure.holds else ': OFF'}")
    for line in lines:
        grid.add_row(Text(line))
    return Padding(grid, (0, 0, 0, 2))


def _figures(figures: Sequence[Figure]) -> RenderableType:
    ran = ["measured"] if any(one.measured is not None for one in figures) else []
    table = _table("", "predicted", "compiled", *ran, "off", "tolerance", "")
    for one in figures:
        show = human_bytes if one.unit == "bytes" else human_seconds
        numbers = [one.compiled, *([one.measured] if ran else [])]
        table.add_row(
            Text(one.name),
            show(one.predicted),
            *("-" if number is None else show(number) for number in numbers),
            _off(one),
            "-" if one.tolerance is None else f"{100 * one.tolerance:g} %",
            Text("" if one.holds else "OFF", "red"),
        )
    return Padding(table, (0, 0, 1, 2))


def _budget(verification: Verification) -> RenderableType:
    kept = f"the compiled peak keeps to the memory budget of {human_bytes(verification.budget_bytes)}"
    if verification.fits and len(verification.attempts) == 1:
        return Padding(Text(kept), (0, 0, 1, 2))
    table = _table("attempt", "planned for", "predicted", "compiled", "predicted step", "plan")
    for number, one in enumerate(verification.attempts, 1):
        sizes = [one.planned_for_bytes, one.predicted_bytes, one.compiled_bytes]
        shown = ["-" if size is None else human_bytes(size) for size in sizes]
        step_time = "-" if one.step_time_s is None else human_seconds(one.step_time_s)
        table.add_row(str(number), *shown, step_time, Text(one.description))
    over = f"the compiled peak is over the memory budget of {human_bytes(verification.budget_bytes)}"
    ways = "give a larger budget or more devices, a smaller batch or model"
    if not verification.fits and len(verification.attempts) == 1:  # a given plan
        ratio = verification.budget_bytes / verification.compiled.peak_bytes
        tighter = verification.plan.prediction.peak_bytes * ratio
        ways = f"plan again with a budget of {human_bytes(tighter)}, or verify without a given plan, which does so"
    grid = Table.grid()
    grid.add_row(Text(kept if verification.fits else f"{over}: {ways}", "" if verification.fits else "red"))
    grid.add_row(table)
    return Padding(grid, (0, 0, 1, 2))


def _collectives(matches: Sequence[CollectiveMatch]) -> RenderableType:
    table = _table("collective", "predicted", "compiled", "off", "", "what for")
    for one in matches:
        table.add_row(
            Text(f"{one.name}, between hosts" if one.crosses_hosts else one.name),
            f"{one.predicted_count}{'*' if one.combinable else ''}: {human_bytes(one.predicted_bytes)}",
            f"{one.compiled_count}: {human_bytes(one.compiled_bytes)}",
            _off(one.figure),
            Text("" if one.figure.holds else "OFF", "red"),
            Text("\n".join(one.causes)),
        )
    starred = (
        Text("* XLA may combine these into fewer: bytes are checked, counts are not")
        if any(one.combinable for one in matches)
        else Text()
    )
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(starred)
    return Padding(grid, (0, 0, 1, 2))


def _one_by_one(verification: Verification) -> RenderableType:
    table = _table("collective", "sends", "decisions", "what for, and where")
    for one in verification.matched.compiled[:FEW_ROWS]:
        uses = [verification.plan.collectives[position] for position in one.predicted]
        causes = list(dict.fromkeys(use.cause for use in sorted(uses, key=lambda use: -use.num_bytes)))
        cause = f"{causes[0]}{', …' if len(causes) > 1 else ''}" if causes else "predicted by no decision"
        times = f" x{one.num_times}" if one.num_times > 1 else ""
        table.add_row(
            Text(f"{collective_name(one.kind, one.axes)}{times}"),
            human_bytes(one.num_bytes),
            str(len(uses)),
            Text(f"{cause}\n{one.path}"),
        )
    _add_rest(table, len(verification.matched.compiled) - FEW_ROWS)
    return Padding(table, (0, 0, 1, 2))


def _unpredicted(rows: Sequence[CompiledCollective]) -> RenderableType:
    table = _table("collective", "sends", "where")
    for one in rows[:MAX_ROWS]:
        where = [one.path, short_source(one.source)]
        table.add_row(
            Text(collective_name(one.kind, one.axes)),
            human_bytes(one.unpredicted_bytes),
            Text("\n".join(filter(None, where))),
        )
    _add_rest(table, len(rows) - MAX_ROWS)
    return Padding(table, (0, 0, 1, 2))


def _missing(verification: Verification) -> RenderableType:
    table = _table("collective", "sends", "what for, and where")
    for position, rest in verification.matched.missing[:MAX_ROWS]:
        use = verification.plan.collectives[position]
        where = [use.cause, use.path, short_source(use.source)]
        name = f"{use.kind} over {', '.join(use.axes)}"
        table.add_row(Text(name), human_bytes(rest), Text("\n".join(filter(None, where))))
    _add_rest(table, len(verification.matched.missing) - MAX_ROWS)
    return Padding(table, (0, 0, 1, 2))


def _add_rest(table: Table, rest: int) -> None:
    if rest > 0:
        table.add_row(Text(f"and {rest} more; --json has all"))


def _off(figure: Figure) -> str:
    return "-" if figure.off is None else f"{100 * figure.off:+.1f} %"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in columns:
        right = name in (
            "planned for",
            "predicted",
            "compiled",
            "measured",
            "replayed",
            "XLA's estimate",
            "off",
            "tolerance",
            "predicted step",
            "sends",
            "decisions",
        )
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
