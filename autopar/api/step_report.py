"""What `report` tells of steps that ran: measured beside predicted.

In: figures. Out: `StepReport`, a value that prints as text and as JSON: the step's time and memory, the utilisation of the
devices, and which of the profile's figures to look into where measured and predicted are far apart.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.errors import PlotError
from autopar.pipeline.draw.file import write_timelines
from autopar.pipeline.draw.predicted_vs_measured import differences
from autopar.pipeline.draw.text import timeline_text
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.system.text_tables import TEXT_WIDTH, inset, plain_text
from autopar.system.units import human_bytes, human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A part of the step that may be what is off.

    Args:
        part: `kernels` or the collectives, by kind.
        predicted_s: what the plan has for it.
        factor: what it would take, as so many times that, for the step to take what was measured, all else as predicted.
        check: the profile's figures it comes from.
    """

    part: str
    predicted_s: float
    factor: float
    check: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepReport:
    """Measured beside predicted. Printed, it is plain text. Bytes are per device.

    Args:
        device_kind: of the devices it ran on, as JAX calls them.
        num_steps: that were measured.
        host_was_ahead: whether calls followed one another faster than steps, so that the mean is told and no median.
        peak_bytes: the most that a device held since the process began; or what XLA's program of the step takes, where
            devices do not say. memory_from: which of the two; None where neither is known.
        model_flops: of the matrix products and convolutions of the step as its user wrote it, on all devices together.
        utilisation: the part of the devices' peak that these are, in the time measured ("MFU").
        suspects: what may be off, the likeliest first; empty where nothing is far off.
        advice: what to do, in words.
        simulated, measured: of a step in stages, when its tasks run; the latter where a step was `measured`.
    """

    program: str
    mesh: str
    hardware: str
    device_kind: str
    num_steps: int
    step_time_s: float
    predicted_s: float
    host_was_ahead: bool
    peak_bytes: float | None
    memory_from: Literal["devices", "compiled"] | None
    predicted_peak_bytes: float
    model_flops: float
    utilisation: float
    suspects: tuple[Suspect, ...]
    advice: tuple[str, ...]
    simulated: PipelineTimeline | None = None
    measured: PipelineTimeline | None = None

    @property
    def off(self) -> float:
        """(predicted - measured) / measured, of the step time."""
        return (self.predicted_s - self.step_time_s) / self.step_time_s

    @property
    def memory_off(self) -> float | None:
        """The same of the peak memory."""
        return (self.predicted_peak_bytes - self.peak_bytes) / self.peak_bytes if self.peak_bytes else None

    @property
    def holds(self) -> bool:
        """Whether neither is far off."""
        return not self.advice

    @property
    def timelines(self) -> tuple[PipelineTimeline, ...]:
        """Those there are."""
        return tuple(one for one in (self.simulated, self.measured) if one is not None)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated timeline and below it the measured: as a picture, or where the path ends in `.json` as a trace
        for Perfetto.

        Raises:
            PlotError: it cannot be written, or the step is one program, which has no timeline.
        """
        if not self.timelines:
            raise PlotError(f"`{self.program}` is one program: there are timelines of steps in stages alone")
        write_timelines(path, *self.timelines)

    def __str__(self) -> str:
        return plain_text(lambda console: render_report(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types: plain seconds and bytes."""
        more: dict[str, Any] = {"off": self.off, "memory_off": self.memory_off, "holds": self.holds}
        for name in ("simulated", "measured"):
            timeline: PipelineTimeline | None = getattr(self, name)
            more[name] = None if timeline is None else timeline.rows()
        return {"format": "autopar-report", "version": 1} | asdict(self) | more


# -- as text ---------------------------------------------------------------------------------


def render_report(told: StepReport, console: Console) -> None:
    """Print a report to a console, with styles where it has them."""
    verdict = "as predicted" if told.holds else "not as predicted"
    console.print(Text.assemble(("Report on ", "bold"), (told.program, "bold"), f": {verdict}"))
    how = "their mean, for the host was ahead of the devices" if told.host_was_ahead else "their median"
    console.print(
        Text(f"{told.num_steps} steps, {how}; mesh {told.mesh}, {told.device_kind}, planned for {told.hardware}\n")
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in ("", "predicted", "measured", "off"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_row("step time", human_seconds(told.predicted_s), human_seconds(told.step_time_s), _percent(told.off))
    peak = "-" if told.peak_bytes is None else human_bytes(told.peak_bytes)
    memory = {"devices": "peak memory", "compiled": "peak memory, as compiled", None: "peak memory"}[told.memory_from]
    table.add_row(memory, human_bytes(told.predicted_peak_bytes), peak, _percent(told.memory_off))
    table.add_row("model FLOPs utilisation", "", f"{100 * told.utilisation:.1f} %", "")
    console.print(Padding(table, (0, 0, 1, 2)))
    if told.suspects:
        console.print(Text("What may be off", "bold"))
        for one in told.suspects:
            text = f"{one.part}: {human_seconds(one.predicted_s)} predicted; alone, x{one.factor:.2g} would explain it. Check {one.check}"
            console.print(Padding(Text(text), (0, 0, 0, 2)))
    for line in told.advice:
        console.print(Padding(Text(f"- {line}"), (0, 0, 0, 2)))
    if told.simulated is not None:
        _print_timelines(told.simulated, told.measured, console)


def _print_timelines(simulated: PipelineTimeline, measured: PipelineTimeline | None, console: Console) -> None:
    """One over the other, and in words where they differ."""
    both = (simulated,) if measured is None else (simulated, measured)
    title = "Timeline of a step" if measured is None else "Timeline of a step: simulated, and as it ran task by task"
    console.print(Text(), Text(title, "bold"), sep="\n")
    console.print(inset(timeline_text(*both, width=min(console.width, TEXT_WIDTH) - 4)))
    if measured is None:
        lines = ("as it runs: call `step.measured(...)` once in place of `step(...)`, and report again",)
    else:
        lines = differences(simulated, measured)
    for line in lines:
        console.print(inset(Text(f"- {line}")))


def _percent(off: float | None) -> str:
    return "-" if off is None else f"{100 * off:+.1f} %"
