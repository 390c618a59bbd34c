"""Define the look of timelines in every picture: letters and colours of phases, task labels, a common time scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.pipeline.schedule.tasks import Phase, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.system.units import human_seconds

#: The colour of idle time.
BUBBLE_COLOUR = "#dfe2e6"
#: Dark enough to be readable on every colour here.
INK = "#16191d"
_STAGE_LETTERS = "abcdefghijklmnopqrstuvwxyz"
#: Timelines whose makespans differ by more than this factor get their own scales, or the shortest would be a thin line.
_MOST_APART = 5


@dataclass(frozen=True, slots=True)
class Look:
    """A phase's letter in text, its colour, and its name in the legend."""

    letter: str
    colour: str
    name: str


LOOKS: Mapping[Phase, Look] = MappingProxyType(
    {
        "forward": Look("F", "#8ab8f0", "forward"),
        "backward": Look("B", "#86cf8f", "backward"),
        "input": Look("I", "#86cf8f", "input part of backward"),
        "weight": Look("W", "#f3c969", "weight part of backward"),
        "update": Look("U", "#cda7e8", "update"),
    }
)


def phases_of(*timelines: PipelineTimeline) -> tuple[Phase, ...]:
    """The phases that occur, in the order of the legend."""
    found = {span.task.phase for timeline in timelines for span in timeline.spans}
    return tuple(phase for phase in LOOKS if phase in found)


def label(task: Task, stages: tuple[int, ...]) -> str:
    """A task's label, such as `F3`; with several stages on its submesh also the stage: `F3a`.

    Args:
        stages: the stages of the submesh.

    >>> label(Task(0, 3, "forward"), (0,)), label(Task(6, 12, "backward"), (2, 6)), label(Task(0, 0, "update"), (0,))
    ('F3', 'B12b', 'U')
    """
    number = "" if task.phase == "update" and task.microbatch == 0 else str(task.microbatch)
    return f"{LOOKS[task.phase].letter}{number}{stage_letter(task.stage, stages)}"


def stage_letter(stage: int, stages: tuple[int, ...]) -> str:
    """The letter of a stage among its submesh's stages: a, b, c, …; empty if it is the only one."""
    if len(stages) < 2:
        return ""
    return _STAGE_LETTERS[stages.index(stage) % len(_STAGE_LETTERS)]


def shade(stage: int, stages: tuple[int, ...], colour: str) -> str:
    """A phase's colour, lighter for each further stage of a submesh.

    >>> shade(0, (0,), "#8ab8f0"), shade(4, (0, 4), "#000000")
    ('#8ab8f0', '#8c8c8c')
    """
    if len(stages) < 2:
        return colour
    white = 0.55 * stages.index(stage) / (len(stages) - 1)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in parts)


def drawn_s(timelines: Sequence[PipelineTimeline]) -> list[float]:
    """For each timeline, the seconds that the picture's width represents: the same for all, so that longer steps look
    longer; or each timeline's own makespan if they differ too much."""
    own = [timeline.makespan_s for timeline in timelines]
    longest = max(own, default=0.0)
    return [longest] * len(own) if longest <= _MOST_APART * min(own, default=0.0) else own


def headline(timeline: PipelineTimeline, scale: float = 1.0) -> str:
    """`1f1b, simulated: 33.0 ms, bubble 27 %`

    Args:
        scale: the factor by which the time axis is stretched relative to the longest timeline.
    """
    text = f"{timeline.title}: {human_seconds(timeline.makespan_s)}, bubble {100 * timeline.bubble_fraction:.0f} %"
    return text if scale == 1 else f"{text} (time axis stretched {scale:.2g} times)"
