"""What runs of layers cost on submeshes: each is planned, as a program of its own.

In: the layers of a step, hardware profiles, and how to plan. Out: `StageCosts`, which a `PartitionProblem` asks. Few
runs are planned:

- Of k equal layers in a run with others before and after them, one is planned with each of these, and

      cost = cost(before + 1) + cost(1 + after) - cost(1) + (k - 1) (cost(2) - cost(1))

- On which mesh a shape is used, and in which form a program is planned there, the layer says that is there most often.
- Options of a shape hold more or less from the forward to the backward pass. They are priced from one plan, by what
  passes between the two and what is computed again (`crossing.py`). A stage that is chosen is planned with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from autopar.cost.hardware import HardwareProfile
from autopar.pipeline.cluster import SubmeshShape
from autopar.pipeline.cutting import Layers, StageProgram
from autopar.pipeline.partition_problem import StageCost
from autopar.pipeline.pieces import Layout
from autopar.pipeline.quick_plan import Form, Way, forms_of, meshes_for, planned_in, quickest
from autopar.pipeline.stage_figures import StageFigures
from autopar.plan import Plan
from autopar.planner import asked_meshes, plan_and_parts
from autopar.program import recomputing
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Solver
from autopar.within_budget import Made

#: What a byte is worth that is held from the forward to the backward pass, by option of a shape, in units of what it
#: takes to write it and to read it: nearly nothing; more than anything but matrix products; more than anything.
OPTIONS: tuple[float, ...] = (0.1, 6.0, 1000.0)
#: What a stage may hold is looked at when the microbatches in flight are known, so not in its plan.
_ENDLESS = 1e6


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Layers planned on a submesh."""

    program: StageProgram
    plan: Plan
    cost: StageCost


@dataclass(frozen=True, slots=True)
class _Base:
    """A run planned for its price."""

    figures: StageFigures
    made: Made
    way: Way


class StageCosts:
    """Prices of runs of layers; what has been planned is kept.

    Args:
        profiles: by kind of device.
        keys: layers with equal keys are equal.
        splits_backward: whether the backward pass is priced in two parts.
        mesh: of every submesh, e.g. `"2x4"`; by default the best one of as many devices.
    """

    def __init__(
        self,
        layers: Layers,
        profiles: Mapping[str, HardwareProfile],
        keys: Sequence[int],
        *,
        splits_backward: bool = False,
        mesh: str | None = None,
        solver: Solver | None = None,
        time_limit_s: float = 60.0,
    ) -> None:
        self.layers, self.profiles, self.keys = layers, profiles, tuple(keys)
        self.splits_backward, self.mesh = splits_backward, mesh
        self.solver = solver or Ilp(time_limit_s=time_limit_s)
        most, count = Counter(self.keys).most_common(1)[0]
        #: The layer that says how a shape is used; none where all differ.
        self.usual = self.keys.index(most) if count > 1 else None
        self._programs: dict[tuple[int, int], StageProgram] = {}
        self._forms: dict[tuple[int, int], tuple[Form, ...]] = {}
        self._bases: dict[tuple[tuple[int, ...], SubmeshShape], _Base] = {}
        self._costs: dict[tuple[tuple[int, ...], SubmeshShape], StageCost] = {}
        self._planned: dict[tuple[int, int, SubmeshShape], PlannedRun] = {}

    @property
    def num_planned(self) -> int:
        """How many runs have been planned, on all shapes together."""
        return len(self._bases) + len(self._planned)

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        """The price of layers `first` to `last`, as a `PartitionProblem` asks it."""
        block = self._longest(first, last)
        if len(block) == 1 or (len(block) == 2 and len(block) == last - first + 1):
            return self._priced(first, last, shape)
        one = self._priced(block.start, block.start, shape)
        two = self._priced(block.start, block.start + 1, shape)
        ends = [(first, block.start)] * (first < block.start) + [(block[-1], last)] * (last > block[-1])
        outer = [self.cost(*run, shape) for run in ends]
        return _sum((1.0, one), (len(block) - 1.0, two), (1.0 - len(block), one), *((1.0, c) for c in outer), *((-1.0, one) for _ in outer))

    def planned(self, first: int, last: int, shape: SubmeshShape) -> PlannedRun:
        """Layers planned on a submesh, with what their backward pass computes again."""
        key = (first, last, shape)
        if key not in self._planned:
            base = self._base(first, last, shape)
            crossing = base.figures.crossings.at(OPTIONS[shape.option])
            program = recomputing(base.made.program, [one.again for one in crossing.recomputed])
            profile = base.made.formulation.profile
            endless = _ENDLESS * profile.hbm_bytes
            plan, made = plan_and_parts(
                program, memory_budget_bytes=endless, mesh=base.way.mesh, hardware=profile, solver=self.solver
            )
            stage = self._program(first, last)
            figures = self._figures(stage, made)
            cost = figures.cost(figures.crossings.as_it_is())
            self._planned[key] = PlannedRun(stage, replace(plan, recomputed=crossing.recomputed), cost)
        return self._planned[key]

    # -- inside ------------------------------------------------------------------------------

    def _longest(self, first: int, last: int) -> range:
        """The longest run of equal layers."""
        best, start = range(first, first + 1), first
        for n in range(first, last + 1):
            if self.keys[n] != self.keys[start]:
                start = n
            if n + 1 - start > len(best):
                best = range(start, n + 1)
        return best

    def _priced(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        key = (self.keys[first : last + 1], shape)
        if key not in self._costs:
            figures = self._base(first, last, shape).figures
            self._costs[key] = figures.cost(figures.crossings.at(OPTIONS[shape.option]))
        return self._costs[key]

    def _base(self, first: int, last: int, shape: SubmeshShape) -> _Base:
        shape = replace(shape, option=0)
        key = (self.keys[first : last + 1], shape)
        if key not in self._bases:
            profile = replace(self.profiles[shape.kind], devices_per_host=shape.devices_per_host)
            forms = self._forms_of(first, last)
            if self.usual is None or (first, last) == (self.usual, self.usual):
                meshes = meshes_for(asked_meshes(self.mesh, shape.num_devices), profile)
                made, way = quickest(meshes, forms, profile, self.solver)
            else:
                usual = self._base(self.usual, self.usual, shape).way
                way = replace(usual, form=min(usual.form, len(forms) - 1))
                made = planned_in(way, forms, profile, self.solver)
            self._bases[key] = _Base(self._figures(self._program(first, last), made), made, way)
        return self._bases[key]

    def _figures(self, stage: StageProgram, made: Made) -> StageFigures:
        return StageFigures(made, Layout(made.program.trace, stage.inputs), splits_backward=self.splits_backward)

    def _program(self, first: int, last: int) -> StageProgram:
        if (first, last) not in self._programs:
            self._programs[first, last] = self.layers.run_of(first, last)
        return self._programs[first, last]

    def _forms_of(self, first: int, last: int) -> tuple[Form, ...]:
        if (first, last) not in self._forms:
            self._forms[first, last] = forms_of(self._program(first, last).program)
        return self._forms[first, last]


def _sum(*parts: tuple[float, StageCost]) -> StageCost:
    """Prices times numbers, added up."""
    value: Callable[[str], float] = lambda name: sum(times * getattr(cost, name) for times, cost in parts)
    return StageCost(**{field.name: max(0.0, value(field.name)) for field in fields(StageCost)})
