"""Report on steps that ran: measured figures against the prediction.

In: figures. Out: `StepReport`, which prints as text and as JSON: the step's time and memory, MFU, and the profile's
figures to check if measured and predicted differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.errors import PlotError
from autopar.pipeline.draw.file import write_timelines
from autopar.pipeline.draw.predicted_vs_measured import differences
from autopar.pipeline.draw.text import timeline_text
from autopar.pipeline.plan_records import WeightVersions
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.report.explain_stages import versions_text
from autopar.system.text_tables import TEXT_WIDTH, inset, plain_text
from autopar.system.units import human_bytes, human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A part of the step whose prediction may be wrong.

    Args:
        part: `kernels`, or the collectives by kind.
        predicted_s: its predicted seconds.
        factor: the factor on `predicted_s` that would explain the measured step time, with all else as predicted.
        check: the profile's figures that determine the prediction.
    """

    part: str
    predicted_s: float
    factor: float
    check: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepReport:
    """Measured figures of a step against its prediction. It prints as plain text. Bytes are per device.

    Args:
        device_kind: the kind of device that ran the steps, as JAX names it.
        num_steps: the number of measured steps.
        host_was_ahead: whether the host dispatched calls faster than the devices ran steps; then `step_time_s` is a
            mean instead of a median.
        peak_bytes: the peak memory of a device since the process began; if devices do not report it, the memory of
            XLA's program; None if neither is known.
        memory_from: the source of `peak_bytes`; None if it is not known.
        model_flops: the FLOPs of the matmuls and convolutions of the step as the user wrote it, on all devices.
        utilisation: MFU: the ratio of these FLOPs per measured second to the devices' peak.
        suspects: parts whose prediction may be wrong, the likeliest first; empty if the prediction holds.
        advice: sentences that say what to do.
        versions: for a stream of batches, the versions of its weights that each stage keeps, and the delay of its gradients.
        simulated: the simulated timeline of a pipelined step, or of the first batches of a stream.
        measured: its measured timeline, if a step was `measured`.
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
    versions: tuple[WeightVersions, ...] = ()
    simulated: PipelineTimeline | None = None
    measured: PipelineTimeline | None = None

    @property
    def off(self) -> float:
        """(predicted - measured) / measured, for the step time."""
        return (self.predicted_s - self.step_time_s) / self.step_time_s

    @property
    def memory_off(self) -> float | None:
        """(predicted - measured) / measured, for the peak memory."""
        return (self.predicted_peak_bytes - self.peak_bytes) / self.peak_bytes if self.peak_bytes else None

    @property
    def holds(self) -> bool:
        """Whether both predictions are close to the measurement."""
        return not self.advice

    @property
    def timelines(self) -> tuple[PipelineTimeline, ...]:
        """The simulated and the measured timeline, as far as they exist."""
        return tuple(one for one in (self.simulated, self.measured) if one is not None)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated timeline, and the measured one below it: as a picture, or as a Perfetto trace if the path
        ends in `.json`."""
        if not self.timelines:
            raise PlotError(f"`{self.program}` is one program: only pipelined steps have timelines")
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
        plain = asdict(replace(self, simulated=None, measured=None))
        return {"format": "autopar-report", "version": 1} | plain | more


# -- text ------------------------------------------------------------------------------------


def render_report(report: StepReport, console: Console) -> None:
    """Print a report to a console, with styles if it supports them."""
    verdict = "as predicted" if report.holds else "not as predicted"
    console.print(Text.assemble(("Report on ", "bold"), (report.program, "bold"), f": {verdict}"))
    how = "mean, as the host ran ahead of the devices" if report.host_was_ahead else "median"
    steps = "batches of a stream, after filling" if report.versions else "steps"
    console.print(
        Text(
            f"{report.num_steps} {steps} ({how}); mesh {report.mesh}, {report.device_kind}, planned for {report.hardware}\n"
        )
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in ("", "predicted", "measured", "off"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_row(
        "step time", human_seconds(report.predicted_s), human_seconds(report.step_time_s), _percent(report.off)
    )
    peak = "-" if report.peak_bytes is None else human_bytes(report.peak_bytes)
    memory = {"devices": "peak memory", "compiled": "peak memory, as compiled", None: "peak memory"}[report.memory_from]
    table.add_row(memory, human_bytes(report.predicted_peak_bytes), peak, _percent(report.memory_off))
    table.add_row("MFU", "", f"{100 * report.utilisation:.1f} %", "")
    console.print(Padding(table, (0, 0, 1, 2)))
    if report.versions:
        console.print(Padding(Text(f"Weights: {versions_text(report.versions)}"), (0, 0, 1, 2)))
    if report.suspects:
        console.print(Text("What may be off", "bold"))
        for one in report.suspects:
            seconds = human_seconds(one.predicted_s)
            text = f"{one.part}: {seconds} predicted; a factor of {one.factor:.2g} would explain the step. Check {one.check}"
            console.print(Padding(Text(text), (0, 0, 0, 2)))
    for line in report.advice:
        console.print(Padding(Text(f"- {line}"), (0, 0, 0, 2)))
    if report.simulated is not None:
        _print_timelines(report.simulated, report.measured, console, streams=bool(report.versions))


def _print_timelines(
    simulated: PipelineTimeline, measured: PipelineTimeline | None, console: Console, *, streams: bool
) -> None:
    """Print both timelines, one below the other, and sentences about their differences."""
    both = (simulated,) if measured is None else (simulated, measured)
    title = "Timeline of a step" if measured is None else "Timeline of a step: simulated, and measured task by task"
    title = "Timeline of a stream of batches, simulated" if streams else title
    console.print(Text(), Text(title, "bold"), sep="\n")
    console.print(inset(timeline_text(*both, width=min(console.width, TEXT_WIDTH) - 4)))
    if streams:
        lines: Sequence[str] = ()
    elif measured is None:
        lines = ("for the measured timeline, call `step.measured(...)` once instead of `step(...)`, and report again",)
    else:
        lines = differences(simulated, measured)
    for line in lines:
        console.print(inset(Text(f"- {line}")))


def _percent(off: float | None) -> str:
    return "-" if off is None else f"{100 * off:+.1f} %"
