"""What a schedule is made for, and what an entry of the table says of it.

Out: `PipelineShape`, `EvenPipeline` (what published formulas are about) and `ScheduleKind`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autopar.pipeline.schedule.tasks import Edges, Needs, Orders, synchronous_needs


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """What the order of tasks depends on.

    Args:
        num_submeshes: those that the stages stand on.
        num_microbatches: parts of the batch.
        virtual: stages on each submesh.
    """

    num_submeshes: int
    num_microbatches: int
    virtual: int = 1


@dataclass(frozen=True, slots=True)
class EvenPipeline:
    """A pipeline of equal stages, with transfers that take no time.

    Args:
        forward_s, input_s, weight_s: of one stage and one microbatch: its forward pass, and the two parts of its backward
            pass. Stages are the virtual ones: where a submesh has v of them, each is 1/v of its work.
    """

    shape: PipelineShape
    forward_s: float
    input_s: float
    weight_s: float

    @property
    def backward_s(self) -> float:
        """The whole backward pass."""
        return self.input_s + self.weight_s

    @property
    def filling_and_draining_s(self) -> float:
        """(p - 1)(F + B), of one stage: where a submesh has v, that is a v-th of its work."""
        return (self.shape.num_submeshes - 1) * (self.forward_s + self.backward_s)


def anything(shape: PipelineShape) -> None:
    """No requirement."""


def one_stage_each(shape: PipelineShape) -> str | None:
    """The requirement that each submesh has one stage."""
    if shape.virtual == 1:
        return None
    return f"puts one stage on each submesh, not {shape.virtual}: leave virtual=1, or take schedule='interleaved'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """An entry of the table: how a schedule's tasks are ordered, and what is known of it.

    Args:
        name: what users ask for.
        words: one sentence for them.
        orders: the order of tasks on each submesh, without updates, which are appended; a schedule whose updates stand
            elsewhere lists them itself.
        needs: what tasks wait for, from those orders and the edges between stages.
        backward: "whole", "split" into input and weight parts, or "none".
        requires: None where the schedule is defined, otherwise what it needs and the way out, as the end of a sentence
            that begins with its name.
        bubble, where: the published idle time of each submesh in an even pipeline, in words, and where exactly that: p
            submeshes, m microbatches, v stages on each submesh; F, B and W what a submesh takes for one microbatch.
        bubble_s, holds: the same as code. None: nothing is published.
        in_flight: for each submesh, the most microbatches in flight, those of all its stages together.
    """

    name: str
    words: str
    orders: Callable[[PipelineShape], Orders]
    needs: Callable[[Orders, Edges], Needs] = synchronous_needs
    backward: Literal["whole", "split", "none"] = "whole"
    requires: Callable[[PipelineShape], str | None] = anything
    bubble: str = ""
    where: str = "always"
    bubble_s: Callable[[EvenPipeline], float] | None = None
    holds: Callable[[EvenPipeline], bool] = lambda even: True
    in_flight: Callable[[PipelineShape], tuple[int, ...]] | None = None
