"""Hold a comparison of a plan with a profile, and print it: predicted, replayed and measured time.

In: made by `compare_profile`. Out: text, JSON. Rows of modules that differ in a number only are merged in the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.system.name_patterns import collapse
from autopar.system.text_tables import new_table, notes_section, plain_text, section, short_source
from autopar.system.units import human_seconds

#: The three kinds of time, in the order of the columns.
COLUMNS = ("predicted", "replayed", "measured")
_MOST_ROWS = 20
_MOST_OPERATIONS = 10
#: Smaller differences of the step time, relative to the prediction, need no explanation.
_CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step on one device; `replayed_s` is None where there is no replay."""

    predicted_s: float
    replayed_s: float | None
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Measured minus predicted."""
        return self.measured_s - self.predicted_s

    def cells(self) -> list[Text]:
        return [Text("-" if one is None else human_seconds(one)) for one in asdict(self).values()]


@dataclass(frozen=True, slots=True)
class Row:
    """The time of a module's kernels in one phase, of a kind of collective in one phase, or idle time.

    Args:
        path: module path; empty for collectives and for operations outside any module.
        kind: `kernels`, a collective with its mesh axes, `host-copy`, or `idle`.
        source: line of the user's code with the most measured time, `file.py:12`.
        exposed: time that counts towards the step time. The rows' times sum to the step time.
        total: time that it runs, hidden or not.
    """

    phase: str
    path: str
    kind: str
    source: str
    exposed: Times
    total: Times

    @property
    def largest_s(self) -> float:
        return max(self.exposed.predicted_s, self.exposed.replayed_s or 0.0, self.exposed.measured_s)

    @property
    def name(self) -> str:
        """A description: `h_0/mlp, backward`, `all-reduce over data, backward`, `idle time`."""
        if self.kind == "idle":
            return "idle time between kernels"
        what = (self.path or "outside any module") if self.kind == "kernels" else self.kind
        return f"{what}, {self.phase}" if self.phase else what


@dataclass(frozen=True, slots=True)
class MeasuredOperation:
    """One HLO instruction in the profile, per device and step.

    Args:
        name: name of the instruction; the kernel's in parentheses where the profile has no instruction.
        kind: collective or `host-copy`; empty for kernels.
        phase, path, source: where it comes from, as far as the HLO's metadata says.
        median_s: median of one run.
        seconds: time that it runs, hidden or not. exposed_s: time that counts towards the step time.
        replayed_s: seconds by the replay, hidden or not.
    """

    name: str
    kind: str
    phase: str
    path: str
    source: str
    runs_per_step: float
    median_s: float
    seconds: float
    exposed_s: float
    replayed_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileComparison:
    """A plan's step next to a measured one. Printed, it is plain text.

    Args:
        profile: first file of the profile. module: name of the HLO module that ran.
        num_steps: complete steps per device in the profile.
        period_s: median time from step to step, with waits for the host; None for one step.
        rows: by the largest of the three times, largest first.
        operations: measured instructions, the one with the most exposed time first.
    """

    program: str
    mesh: str
    hardware: str
    profile: str
    module: str
    device_kind: str
    num_devices: int
    num_steps: int
    step_time: Times
    period_s: float | None
    rows: tuple[Row, ...] = field(repr=False)
    operations: tuple[MeasuredOperation, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def collectives(self) -> tuple[Row, ...]:
        """The rows of transfers."""
        return tuple(row for row in self.rows if row.kind not in ("kernels", "idle"))

    def totals(self, key: Callable[[Row], str], *, hidden: bool = False) -> dict[str, Times]:
        """Times by key, the largest first.

        Args:
            hidden: count hidden time too.
        """
        found: dict[str, list[Times]] = defaultdict(list)
        for row in self.rows:
            found[key(row)].append(row.total if hidden else row.exposed)
        summed = {name: _sum(times) for name, times in found.items()}
        return dict(sorted(summed.items(), key=lambda item: -_largest(item[1])))

    def by_phase(self) -> dict[str, Times]:
        return self.totals(lambda row: "idle" if row.kind == "idle" else row.phase or "unknown")

    def by_module(self) -> dict[str, Times]:
        """Kernels by the two outermost modules; modules that differ in a number only are one."""
        outer = [_outer(row) for row in self.rows]
        patterns = {outer[at]: pattern for pattern, at_all in collapse(outer) for at in at_all}
        found = self.totals(lambda row: patterns[_outer(row)])
        return {name: times for name, times in found.items() if name}

    def by_collective(self, *, hidden: bool = False) -> dict[str, Times]:
        found = self.totals(lambda row: "" if row.kind in ("kernels", "idle") else row.kind, hidden=hidden)
        return {name: times for name, times in found.items() if name}

    def reason(self) -> str:
        """A sentence on where most of the difference comes from."""
        step = self.step_time
        off = step.difference_s
        measured, planned = human_seconds(step.measured_s), human_seconds(step.predicted_s)
        if abs(off) <= _CLOSE * step.predicted_s:
            return f"The step took {measured}, as predicted ({planned})."
        longer = "longer" if off > 0 else "shorter"
        text = f"The step took {measured}, {human_seconds(abs(off))} {longer} than predicted ({planned})."
        causes = sorted(_folded(self.rows), key=lambda row: -row.exposed.difference_s * (1 if off > 0 else -1))
        if not causes or causes[0].exposed.difference_s * off <= 0:
            return text
        first = causes[0]
        part = abs(first.exposed.difference_s)
        most = "Most" if part > 0.5 * abs(off) else "The largest part"
        exposed = "exposed " if first.kind not in ("kernels", "idle") else ""
        times = (
            f"{human_seconds(first.exposed.predicted_s)} predicted, {human_seconds(first.exposed.measured_s)} measured"
        )
        return f"{text} {most} of the difference is {exposed}{first.name}: {times}."

    def __str__(self) -> str:
        return plain_text(lambda console: render_comparison(self, console))

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types, in seconds."""
        named = {"by_phase": self.by_phase(), "by_module": self.by_module(), "by_collective": self.by_collective()}
        return {
            "format": "autopar-profile-comparison",
            "version": 1,
            **asdict(self),
            **{name: {key: asdict(times) for key, times in found.items()} for name, found in named.items()},
            "reason": self.reason(),
        }


def render_comparison(found: ProfileComparison, console: Console) -> None:
    """Print a comparison to a console, with styles where it has them."""
    console.print(Text.assemble(("Profile of ", "bold"), (found.program, "bold"), f" on {found.mesh}"))
    console.print(
        Text(
            f"{found.num_steps} step{'s' if found.num_steps != 1 else ''} of {found.module} on {found.num_devices} x"
            f" {found.device_kind}; planned for {found.hardware}\n"
        )
    )
    console.print(Text(found.reason() + "\n"))
    step = new_table("", *COLUMNS, right=COLUMNS)
    step.add_row(Text("step time"), *found.step_time.cells())
    for phase, times in found.by_phase().items():
        step.add_row(Text(f"  {phase}"), *times.cells())
    _print(console, section("Step", step))
    rows = _folded(row for row in found.rows if row.kind != "idle")
    table = new_table("what", "from", *COLUMNS, right=COLUMNS)
    for row in rows[:_MOST_ROWS]:
        table.add_row(Text(row.name), Text(short_source(row.source)), *row.exposed.cells())
    _print(console, section("Time by module and collective, exposed", table, _rest(rows, _MOST_ROWS)))
    _print_totals(found, console)
    operations = new_table("operation", "from", "runs", "replayed", "measured", right=("runs", "replayed", "measured"))
    for one in found.operations[:_MOST_OPERATIONS]:
        replayed = "-" if one.replayed_s is None else human_seconds(one.replayed_s)
        where = short_source(one.source) or one.path
        cells = one.name, where, f"{one.runs_per_step:g}", replayed, human_seconds(one.seconds)
        operations.add_row(*map(Text, cells))
    _print(console, section("Longest operations, hidden time included", operations))
    notes = list(found.notes)
    if found.period_s is not None and found.period_s > 1.05 * found.step_time.measured_s:
        wait = human_seconds(found.period_s - found.step_time.measured_s)
        notes.append(f"a step begins every {human_seconds(found.period_s)}: the devices wait {wait} for the host")
    _print(console, notes_section(notes) if notes else [])


def _print_totals(found: ProfileComparison, console: Console) -> None:
    modules = new_table("module", *COLUMNS, right=COLUMNS)
    for name, times in list(found.by_module().items())[:_MOST_ROWS]:
        modules.add_row(Text(name), *times.cells())
    if modules.row_count:
        _print(console, section("Kernels by module", modules))
    hidden = found.by_collective(hidden=True)
    if hidden:
        table = new_table("collective", "", *COLUMNS, right=COLUMNS)
        for name, exposed in found.by_collective().items():
            table.add_row(Text(name), Text("exposed"), *exposed.cells())
            table.add_row(Text(""), Text("total"), *hidden[name].cells())
        _print(console, section("Collectives", table))


def _print(console: Console, parts: Iterable[Any]) -> None:
    for part in parts:
        console.print(part)


def _outer(row: Row) -> str:
    """The two outermost modules of a row of kernels; empty for other rows."""
    return "/".join(row.path.split("/")[:2]) or "outside any module" if row.kind == "kernels" else ""


def _folded(rows: Iterable[Row]) -> list[Row]:
    """Rows whose names differ in a number only as one, the largest first."""
    given = list(rows)
    texts = [f"{row.kind}\n{row.phase}\n{row.path}" for row in given]
    found = []
    for pattern, positions in collapse(texts):
        members = [given[at] for at in positions]
        kind, phase, path = pattern.split("\n")
        sources = dict.fromkeys(row.source for row in members if row.source)
        found.append(
            Row(
                phase,
                path,
                kind,
                next(iter(sources), ""),
                _sum(row.exposed for row in members),
                _sum(row.total for row in members),
            )
        )
    return sorted(found, key=lambda row: -row.largest_s)


def _rest(rows: Sequence[Row], most: int) -> str:
    left = _sum(row.exposed for row in rows[most:])
    if len(rows) <= most:
        return ""
    return f"{len(rows) - most} more: {human_seconds(left.predicted_s)} predicted, {human_seconds(left.measured_s)} measured"


def _sum(times: Iterable[Times]) -> Times:
    found = list(times)
    replayed = [one.replayed_s for one in found if one.replayed_s is not None]
    return Times(
        sum(one.predicted_s for one in found),
        sum(replayed) if replayed or not found else None,
        sum(one.measured_s for one in found),
    )


def _largest(times: Times) -> float:
    return max(times.predicted_s, times.replayed_s or 0.0, times.measured_s)
