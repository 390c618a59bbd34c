"""Record when the tasks of a step ran, simulated or measured.

In: spans.
Out: `PipelineTimeline`, with the makespan and the idle time; the drawings use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from autopar.pipeline.schedule.tasks import Task


class Span(NamedTuple):
    """A task, its submesh, and the seconds at which it started and ended, on one clock for all submeshes."""

    submesh: int
    task: Task
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """One step on all submeshes.

    Args:
        title: a title such as "1f1b, simulated".
        num_submeshes: the number of submeshes, including idle ones.
        spans: the spans in any order. Measured spans of one submesh may overlap; overlapping time counts once.
        versions: the version of the weights that each task reads, to be drawn; empty in synchronous steps.
    """

    title: str
    num_submeshes: int
    spans: tuple[Span, ...]
    versions: Mapping[Task, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def start_s(self) -> float:
        return min((span.start_s for span in self.spans), default=0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first task to the end of the last."""
        return max((span.end_s for span in self.spans), default=0) - self.start_s

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Busy seconds of each submesh."""
        return tuple(_covered(self.on(submesh)) for submesh in range(self.num_submeshes))

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle seconds of each submesh within the makespan: its bubble."""
        whole = self.makespan_s
        return tuple(whole - busy for busy in self.busy_s)

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """The idle fraction of the makespan of each submesh."""
        whole = self.makespan_s
        return tuple(idle / whole if whole else 0.0 for idle in self.idle_s)

    @property
    def bubble_fraction(self) -> float:
        """The mean idle fraction of all submeshes."""
        fractions = self.bubble_fractions
        return sum(fractions) / len(fractions) if fractions else 0.0

    def on(self, submesh: int) -> list[Span]:
        """A submesh's spans by their start."""
        return sorted((span for span in self.spans if span.submesh == submesh), key=lambda s: (s.start_s, s.end_s))

    def tasks_by_start(self) -> list[Task]:
        """The tasks of a simulated step in the order in which they start. Ties keep the simulator's order, in which each
        task follows those that it depends on."""
        return [span.task for span in sorted(self.spans, key=lambda span: span.start_s)]

    def rows(self) -> list[dict[str, Any]]:
        """The spans as JSON types."""
        return [
            {"submesh": span.submesh, "start_s": span.start_s, "end_s": span.end_s, **span.task._asdict()}
            for span in self.spans
        ]

    def stages_on(self, submesh: int) -> tuple[int, ...]:
        """The stages that a submesh ran, in program order."""
        return tuple(sorted({span.task.stage for span in self.spans if span.submesh == submesh}))


def _covered(spans: Iterable[Span]) -> float:
    """Seconds that spans, sorted by start, cover together."""
    total, reached = 0, None
    for span in spans:
        start = span.start_s if reached is None else max(span.start_s, reached)
        if span.end_s > start:
            total += span.end_s - start
        reached = span.end_s if reached is None else max(span.end_s, reached)
    return total
