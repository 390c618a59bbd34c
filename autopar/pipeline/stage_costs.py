"""What runs of layers cost on submeshes: each is planned, as a program of its own.

In: the layers of a step, hardware profiles, and how to plan. Out: `StageCosts`, which a `PartitionProblem` asks. A run of
many equal layers is not planned: two runs with fewer of them are, and each layer more takes what one took there. Where
a stage would hold too much from the forward to the backward pass, another option of the same submesh computes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.cost.hardware import HardwareProfile
from autopar.pipeline.cluster import SubmeshShape
from autopar.pipeline.cutting import Layers, StageProgram
from autopar.pipeline.partition_problem import StageCost
from autopar.pipeline.pieces import Layout
from autopar.pipeline.stage_figures import stage_cost
from autopar.plan import Plan
from autopar.planner import plan_and_parts
from autopar.program import recomputing
from autopar.rematerialise.ladder import ladder
from autopar.within_budget import Made

#: So many equal layers are planned; what more of them take is read off one less.
_PLANNED = 3
#: Of the rungs that compute more and more again, where on the ladder each option stands; the first computes nothing.
OPTIONS: tuple[float, ...] = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Layers planned on a submesh."""

    program: StageProgram
    plan: Plan
    cost: StageCost


class StageCosts:
    """Prices of runs of layers; what has been planned is kept.

    Args:
        profiles: by kind of device.
        keys: layers with equal keys are equal.
        options: of `plan_and_parts`.
    """

    def __init__(
        self,
        layers: Layers,
        profiles: Mapping[str, HardwareProfile],
        keys: Sequence[int],
        *,
        splits_backward: bool = False,
        **options: Any,
    ) -> None:
        self.layers, self.profiles, self.keys = layers, profiles, tuple(keys)
        self.splits_backward, self.options = splits_backward, options
        self._programs: dict[tuple[int, int], StageProgram] = {}
        self._planned: dict[tuple[int, int, SubmeshShape], PlannedRun] = {}

    @property
    def num_planned(self) -> int:
        """How many runs have been planned."""
        return len(self._planned)

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        """The price of layers `first` to `last`, as a `PartitionProblem` asks it."""
        shorter = self._shorter(first, last)
        if shorter is None:
            return self.planned(first, last, shape).cost
        run, one_less, more = shorter
        long, short = self.planned(*run, shape).cost, self.planned(*one_less, shape).cost
        return StageCost(
            **{
                field.name: max(0.0, value + more * (value - getattr(short, field.name)))
                for field in fields(StageCost)
                for value in [getattr(long, field.name)]
            }
        )

    def planned(self, first: int, last: int, shape: SubmeshShape) -> PlannedRun:
        """Layers planned on a submesh."""
        key = (first, last, shape)
        if key not in self._planned:
            self._planned[key] = self.plan_stage(self._program(first, last), shape)
        return self._planned[key]

    def plan_stage(self, stage: StageProgram, shape: SubmeshShape) -> PlannedRun:
        """A stage's program planned on a submesh, as runs of layers are."""
        profile = replace(self.profiles[shape.kind], devices_per_host=shape.devices_per_host)
        given = {"num_devices": shape.num_devices, "hardware": profile} | self.options
        endless = 1e6 * profile.hbm_bytes  # what it may hold depends on how many microbatches are in flight
        plan, made = plan_and_parts(stage.program, memory_budget_bytes=endless, **given)
        again = OPTIONS[shape.option]
        rungs = ladder(made.program.trace, made.formulation, made.solution.choices, made.parts.device) if again else []
        if rungs:
            rung = rungs[round(again * (len(rungs) - 1))]
            program = recomputing(made.program, [one.again for one in rung])
            plan, made = plan_and_parts(program, memory_budget_bytes=endless, mesh=plan.mesh, hardware=profile)
            plan = replace(plan, recomputed=rung)
        return PlannedRun(stage, plan, self._figures(stage, made))

    # -- inside ------------------------------------------------------------------------------

    def _program(self, first: int, last: int) -> StageProgram:
        if (first, last) not in self._programs:
            self._programs[first, last] = self.layers.run_of(first, last)
        return self._programs[first, last]

    def _figures(self, stage: StageProgram, made: Made) -> StageCost:
        layout = Layout(made.program.trace, stage.inputs)
        return stage_cost(made, layout, splits_backward=self.splits_backward)

    def _shorter(self, first: int, last: int) -> tuple[tuple[int, int], tuple[int, int], int] | None:
        """Runs to plan in place of one: with as many equal layers as are planned and with one less, at the end of the run
        that is made of equal ones; and how many more the run has. None where the run is planned itself."""
        keys = self.keys[first : last + 1]
        equal_first = next((n for n, key in enumerate(keys) if key != keys[0]), len(keys))
        equal_last = next((n for n, key in enumerate(reversed(keys)) if key != keys[-1]), len(keys))
        if equal_first == len(keys):
            more = len(keys) - _PLANNED
            return ((first, first + _PLANNED - 1), (first, first + _PLANNED - 2), more) if more > 0 else None
        if equal_last >= equal_first and equal_last > _PLANNED:  # others first, then equal ones
            more = equal_last - _PLANNED
            return (first, last - more), (first, last - more - 1), more
        if equal_first > _PLANNED:
            more = equal_first - _PLANNED
            return (first + more, last), (first + more + 1, last), more
        return None
