"""Define an entry of the schedule table.

Out: `PipelineShape`, `EvenPipeline` (the model of the published bubble formulas), placements, and `ScheduleKind`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autopar.pipeline.schedule.objective import Objective
from autopar.pipeline.schedule.tasks import Edges, Needs, Orders, Shares, synchronous_needs
from autopar.pipeline.schedule.versions import SYNCHRONOUS, VersionRule

#: For each stage, in program order, the submeshes that run it; a stage on several has a replica on each.
Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The numbers that determine the order of tasks.

    Args:
        num_submeshes: the number of submeshes.
        num_microbatches: the number of microbatches per step, which is one update.
        virtual: the number of virtual stages per submesh.
        num_updates: the number of steps whose tasks are ordered together; more than one only in asynchronous schedules.
    """

    num_submeshes: int
    num_microbatches: int
    virtual: int = 1
    num_updates: int = 1


@dataclass(frozen=True, slots=True)
class EvenPipeline:
    """A pipeline of equal stages with transfers that take no time.

    Args:
        forward_s: seconds of the forward pass of one virtual stage and one microbatch.
        input_s: seconds of the input part of its backward pass.
        weight_s: seconds of the weight part of its backward pass. With v virtual stages per submesh, each stage does
            1/v of the submesh's work.
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
    def filling_s(self) -> float:
        """(p - 1)F for one virtual stage."""
        return (self.shape.num_submeshes - 1) * self.forward_s

    @property
    def filling_and_draining_s(self) -> float:
        """(p - 1)(F + B) for one virtual stage."""
        return (self.shape.num_submeshes - 1) * (self.forward_s + self.backward_s)

    @property
    def has_equal_parts(self) -> bool:
        """Whether forward pass, input part and weight part take equally long."""
        return self.forward_s == self.input_s == self.weight_s


def in_turn(shape: PipelineShape) -> Placement:
    """Stage s on submesh s mod p.

    >>> in_turn(PipelineShape(2, 1, virtual=2))
    ((0,), (1,), (0,), (1,))
    """
    return tuple((stage % shape.num_submeshes,) for stage in range(shape.num_submeshes * shape.virtual))


def down_and_up(shape: PipelineShape) -> Placement:
    """The stages go down the submeshes and up again.

    >>> down_and_up(PipelineShape(3, 1, virtual=2))
    ((0,), (1,), (2,), (2,), (1,), (0,))
    """
    down = [(submesh,) for submesh in range(shape.num_submeshes)]
    return tuple(place for n in range(shape.virtual) for place in (down if n % 2 == 0 else reversed(down)))


def one_stage_each(shape: PipelineShape) -> str | None:
    """The requirement that each submesh has one stage."""
    if shape.virtual == 1:
        return None
    return f"puts one stage on each submesh, not {shape.virtual}: leave virtual=1, or take schedule='interleaved'"


def both_ways(shape: PipelineShape) -> Placement:
    """Each stage on two submeshes: the stages go down for some microbatches, and up for the others.

    >>> both_ways(PipelineShape(2, 2))
    ((0, 1), (1, 0))
    """
    last = shape.num_submeshes - 1
    return tuple((stage, last - stage) for stage in range(shape.num_submeshes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """An entry of the schedule table.

    Args:
        name: the schedule's name in the API.
        description: one sentence.
        orders: a function that orders the tasks of each submesh. Updates are appended, unless the orders contain them.
        needs: a function from those orders and the edges between stages to the dependencies of tasks.
        backward: "whole", "split" into input and weight parts, or "none".
        requires: a function that returns None where the schedule is defined, else the requirement and the way out, as
            the end of a sentence that begins with the schedule's name; by default it is defined for the `virtuals`.
        bubble: the published idle time of each submesh in an even pipeline, as text: p submeshes, m microbatches, v
            stages per submesh; F, B and W are a submesh's seconds per microbatch.
        where: the condition under which `bubble` is exact, as text.
        bubble_s: `bubble` as code; None if nothing is published.
        holds: `where` as code.
        in_flight: a function that gives each submesh's peak of in-flight microbatches of all its stages.
        placement: the submeshes of each stage, as the orders have them.
        parts: the parts of each microbatch that it orders as tasks of their own. They run if they are slices of tokens, and
            can be simulated otherwise.
        token_slices: the tokens of each part, for parts that are slices of tokens.
        shares: the share of each part in the seconds of a microbatch's forward and backward pass; by default equal.
        virtuals: the numbers of virtual stages per submesh that a search tries, the usual one first.
        in_planned_order: whether submeshes may run their tasks in an order by planned times, where that is faster than the
            printed one. The backward pass is split, and each stage is on one submesh.
        is_searched: whether `schedule="auto"` tries it.
        objective: a function from the numbers of microbatches and of virtual stages per submesh to the objective by which
            stages are cut; by default `estimated_objective`.
        reads: which version of the weights each task reads. Unless it is synchronous, the orders contain the updates, and are
            defined for several of them (`PipelineShape.num_updates`).
    """

    name: str
    description: str
    orders: Callable[[PipelineShape], Orders]
    needs: Callable[[Orders, Edges], Needs] = synchronous_needs
    backward: Literal["whole", "split", "none"] = "whole"
    requires: Callable[[PipelineShape], str | None] | None = None
    bubble: str = ""
    where: str = "always"
    bubble_s: Callable[[EvenPipeline], float] | None = None
    holds: Callable[[EvenPipeline], bool] = lambda even: True
    in_flight: Callable[[PipelineShape], tuple[int, ...]] | None = None
    placement: Callable[[PipelineShape], Placement] = in_turn
    parts: int = 1
    token_slices: tuple[int, ...] = ()
    shares: Shares = ()
    virtuals: tuple[int, ...] = (1,)
    in_planned_order: bool = False
    is_searched: bool = False
    objective: Callable[[int, int], Objective] | None = None
    reads: VersionRule = SYNCHRONOUS

    @property
    def is_asynchronous(self) -> bool:
        """Whether batches follow each other without waiting for updates."""
        return not self.reads.is_synchronous

    @property
    def has_replicas(self) -> bool:
        """Whether it has stages on several submeshes each."""
        shapes = (PipelineShape(p, 2 * p, self.virtuals[0]) for p in (2, 3, 4))
        return any(len(places) > 1 for shape in shapes for places in self.placement(shape))
