"""Search for stages that fork and join, in addition to the chains of `stage_search.py`.

In: a step whose forward pass has branches, their layers, and a cluster.
Out: `BranchSearch`. For a number of microbatches it finds the fastest simulated `StagedStep` that fits and runs
branches in parallel. It partitions the layers as a chain on submeshes that may be split into parts for branches
(`branches.py`). The best partitions are then scheduled as a DAG of stages and simulated, with the same costs as chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.cut.branches import ForkedLayers
from autopar.pipeline.cut.exchanges import crossing_bytes, exchanges_of, exchanges_of_layers
from autopar.pipeline.cut.stage_programs import Cuttable, Layers, StageProgram
from autopar.pipeline.partition.branches import Branches, on_part
from autopar.pipeline.partition.cluster import Cluster, SubmeshShape, submeshes_of
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.problem import Partition, PartitionProblem, Stage, StageCost
from autopar.pipeline.partition.sends import Send, edges_between
from autopar.pipeline.partition.step_time import staged_peaks, staged_timeline, task_seconds
from autopar.pipeline.schedule.dag import NAMES, Backward, backward_in, list_schedule
from autopar.pipeline.schedule.one_forward_one_backward import ONE_F_ONE_B
from autopar.pipeline.schedule.sequential import INFERENCE
from autopar.pipeline.schedule.table import objective_of
from autopar.pipeline.search.schedule_costs import unsplit_backward
from autopar.pipeline.search.sent_values import with_sent_values
from autopar.pipeline.search.stage_costs import STASH_PRICES, PlannedRun, StageCosts, likely_shapes
from autopar.pipeline.search.stage_layouts import StageLayouts
from autopar.pipeline.search.stage_search import FAR, SLOW, Outcome, StagedStep
from autopar.pipeline.search.transfer_prices import sends_of, sent_s
from autopar.solve.problem import Status

#: The number of partitions to simulate.
_MOST_SIMULATED = 3
#: The relative gap at which the search for a partition ends.
_RELATIVE_GAP = 5e-3


@dataclass(slots=True)
class BranchSearch:
    """A search for stages that fork and join.

    Args:
        layers: the layers; each branch has its own.
        profiles: the hardware profile of each kind of device.
        time_limit_s: seconds for one partition.
        num_stages: the exact number of stages; None for any. Then all split submeshes of a partition run equally many.
        layouts: the meshes and shardings of stages that the user fixes.
        planning: options of `StageCosts`.
        limit_s: the step time from which on steps are of no use.
    """

    cuttable: Cuttable
    layers: ForkedLayers
    cluster: Cluster
    profiles: Mapping[str, HardwareProfile]
    time_limit_s: float
    num_stages: int | None = None
    layouts: StageLayouts = field(default_factory=StageLayouts)
    planning: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = math.inf
    _costs: dict[int, StageCosts] = field(default_factory=dict)
    _num_planned: int = 0

    @property
    def num_planned(self) -> int:
        """The number of planned runs of layers and stages."""
        return self._num_planned + sum(costs.num_planned for costs in self._costs.values())

    def outcomes(
        self, count: int, shapes: Sequence[SubmeshShape], budget_bytes: Mapping[str, float]
    ) -> list[tuple[str, Outcome]]:
        """For each schedule's name, the fastest step that fits, or why there is none.

        Args:
            count: the number of microbatches.
            shapes: the shapes of submeshes before they are split.
            budget_bytes: the memory budget of a device of each kind.
        """
        costs = self._costs_for(count)
        like = ONE_F_ONE_B if self._trains else INFERENCE
        problem = PartitionProblem(
            num_layers=len(self.layers.keys),
            cluster=self.cluster,
            cost=costs.cost,
            transfer_s=self._transfer_s(count),
            objective=objective_of(like, count, 1),
            budget_bytes=budget_bytes,
            together=True,
            layer_keys=self.layers.keys,
            shapes=costs.in_options(shapes, budget_bytes),
            bound=costs.bound,
            limit_s=FAR * self.limit_s,
        )
        partitioner = ExactPartitioner(time_limit_s=self.time_limit_s, relative_gap=_RELATIVE_GAP)
        backwards: list[Backward] = ["whole", "split"] if self._trains else ["none"]
        to_split = None if self.layouts.by_size is None else costs.in_options(self._splittable(), budget_bytes)
        steps: list[StagedStep] = []
        may_fit = False
        for branches, split in self._problems(problem, count, to_split):
            partition = partitioner.partition(split)
            may_fit |= partition.status is not Status.INFEASIBLE
            if self.num_stages is not None:  # other divisions of the stages among submeshes were not searched
                partition = replace(partition, status=Status.UNPROVEN, lower_bound_s=0.0)
            found = dict.fromkeys((partition.stages, *partition.others))
            forked = [stages for stages in found if any(stage.submesh.shape.parts > 1 for stage in stages)]
            laid = [self._forked_stages(branches, stages, partition, count) for stages in forked]
            wanted = [one for one in laid if self.num_stages in (None, len(one.stages))]
            steps += [one.run(backward) for one in wanted[:_MOST_SIMULATED] for backward in backwards]
        fitting = [step for step in steps if step.over(budget_bytes) <= 1]
        is_slow = math.isfinite(self.limit_s) and may_fit
        outcomes: list[tuple[str, Outcome]] = []
        for name in (NAMES[backward] for backward in backwards):
            of_schedule = [step for step in fitting if step.schedule.name == name]
            best = min(of_schedule, key=lambda step: step.step_time_s, default=None)
            reason = SLOW if is_slow else "no branches side by side fit"
            outcomes.append((name, Outcome(best, reason, is_slow=is_slow and best is None)))
        return outcomes

    def planned(
        self, count: int, step: StagedStep
    ) -> tuple[tuple[StageProgram, ...], tuple[PlannedRun, ...], StagedStep]:
        """The programs of a step's stages, their plans, and the step with the costs of these plans."""
        assert step.layer_of is not None
        stage_of = [s for s, stage in enumerate(step.stages) for _ in range(stage.first, stage.last + 1)]
        layers = self.cuttable.layered([stage_of[layer] for layer in step.layer_of], count)
        numbers = range(len(step.stages))
        programs = self.cuttable.settled(step.layer_of, stage_of, count)
        costs = self._stage_costs(layers, numbers)
        runs = [
            costs.planned(number, number, stage.submesh.shape, program)
            for number, stage, program in zip(numbers, step.stages, programs, strict=True)
        ]
        self._num_planned += costs.num_planned + len(runs)
        splits = step.schedule.splits_backward
        runs = with_sent_values(runs, step.stages, self.profiles, count, splits_backward=splits)
        sends = sends_of(exchanges_of(programs), step.stages, self.cluster, self.profiles)
        stage_costs = tuple(run.cost for run in runs)
        forked = _ForkedStages(step.stages, stage_costs, sends, step.partition, count, step.layer_of)
        return programs, runs, forked.run(backward_in(step.schedule.name))

    # -- helpers -----------------------------------------------------------------------------

    @property
    def _trains(self) -> bool:
        return bool(self.cuttable.flow.backward)

    def _problems(
        self, problem: PartitionProblem, count: int, to_split: Sequence[SubmeshShape] | None
    ) -> Iterator[tuple[Branches, PartitionProblem]]:
        """The problems to solve: with all shapes, and with split submeshes only. For an exact number of stages, one for
        each number of submeshes of which equally many stages each run on some, and one stage each on the others.

        Args:
            to_split: the shapes of submeshes that may be split; by default those of the problem.
        """
        output_bytes, wanted = self.layers.made_bytes, self.num_stages

        def to_and_fro_s(layer: int, part: SubmeshShape, same_host: bool) -> float:
            return 2 * sent_s(output_bytes[layer] / count, part, part, same_host, self.cluster, self.profiles)

        for number, on_split in _divisions(wanted, problem.most_stages):
            branches = Branches(problem, self.layers.edges, to_and_fro_s, num_stages=on_split)
            both = branches.with_split_submeshes(to_split, self.layouts.may_use)
            split = tuple(shape for shape in both.shapes if shape.parts > 1 and _differs(shape, problem.shapes))
            if not split:
                continue
            either = (*problem.shapes, *split)
            if number is None or on_split is None:
                among = [either, split]
            else:
                among = [split if number * on_split == wanted else either]
            for shapes in among:
                yield branches, replace(both, shapes=shapes, num_stages=number)

    def _splittable(self) -> Sequence[SubmeshShape]:
        """The shapes whose parts may be what the user's mesh and pins allow, though the whole may not."""
        return self.cluster.shapes() if self.layouts.is_one_mesh else likely_shapes(self.cluster)

    def _costs_for(self, count: int) -> StageCosts:
        if count not in self._costs:
            layers, keys = self.cuttable.layered(self.layers.layer_of, count), range(len(self.layers.keys))
            self._costs[count] = self._stage_costs(layers, keys, together=tuple(keys))
        return self._costs[count]

    def _stage_costs(self, layers: Layers, keys: Sequence[int], together: Sequence[int] | None = None) -> StageCosts:
        options = {"together": together, "splits_backward": True, "layouts": self.layouts, **self.planning}
        return StageCosts(layers, self.profiles, keys, **options)

    def _transfer_s(self, count: int) -> Callable[[int, SubmeshShape, SubmeshShape, bool], float]:
        """The seconds to transfer activations and gradients where a chain of these layers is cut."""
        across = [crossing_bytes(self.layers.passing, layer) / count for layer in range(len(self.layers.keys))]

        def transfer_s(boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
            return 2 * sent_s(across[boundary], source, target, same_host, self.cluster, self.profiles)

        return transfer_s

    def _forked_stages(
        self, branches: Branches, stages: Sequence[Stage], partition: Partition, count: int
    ) -> _ForkedStages:
        """Turn the parts of stages into stages, and renumber their layers stage by stage."""
        laid = branches.forked_stages(stages)
        layers_of: list[list[int]] = [[] for _ in laid.place_of]
        for layer, stage in enumerate(laid.stage_of):
            layers_of[stage].append(layer)
        number = {layer: n for n, layer in enumerate(layer for layers in layers_of for layer in layers)}
        own: list[Stage] = []
        costs: list[StageCost] = []
        for layers, (whole, part) in zip(layers_of, laid.place_of, strict=True):
            submesh = on_part(stages[whole].submesh, part)
            own.append(Stage(number[layers[0]], number[layers[-1]], submesh))
            costs.append(_together(branches.costs_of(layers, submesh.shape)))
        passing = [replace(one, num_bytes=one.num_bytes / count) for one in self.layers.passing]
        exchanges = exchanges_of_layers(passing, laid.stage_of, trains=self._trains)
        sends = sends_of(exchanges, own, self.cluster, self.profiles)
        layer_of = tuple(number[layer] for layer in self.layers.layer_of)
        return _ForkedStages(tuple(own), tuple(costs), sends, partition, count, layer_of)


@dataclass(frozen=True, slots=True)
class _ForkedStages:
    """Stages that fork and join, before scheduling.

    Args:
        costs: costs with a split backward pass.
        count: the number of microbatches.
        layer_of: the layer of each unit of the forward pass.
    """

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    sends: tuple[Send, ...]
    partition: Partition
    count: int
    layer_of: tuple[int, ...]

    def run(self, backward: Backward) -> StagedStep:
        """The scheduled and simulated step."""
        costs = self.costs if backward == "split" else tuple(map(unsplit_backward, self.costs))
        places: dict[range, int] = {}
        schedule = list_schedule(
            edges_between(self.sends),
            [places.setdefault(stage.submesh.devices, len(places)) for stage in self.stages],
            self.count,
            seconds=task_seconds(costs),
            backward=backward,
        )
        timeline = staged_timeline(schedule, costs, self.sends, submeshes_of(self.stages))
        peaks = staged_peaks(schedule, costs)
        return StagedStep(self.stages, costs, self.sends, schedule, timeline, peaks, self.partition, self.layer_of)


def _divisions(num_stages: int | None, most: int) -> Iterator[tuple[int | None, int | None]]:
    """The numbers of submeshes, and of stages on each submesh that is split, with which there can be exactly so many
    stages if each other submesh runs one.

    >>> list(_divisions(4, 8))
    [(1, 4), (2, 3), (2, 2), (3, 2)]
    """
    if num_stages is None:
        yield None, None
        return
    for number in range(1, min(num_stages - 1, most) + 1):
        more = num_stages - number
        for on_split in range(more + 1, 1, -1):
            if more % (on_split - 1) == 0 and more // (on_split - 1) <= number:
                yield number, on_split


def _differs(shape: SubmeshShape, plain: Sequence[SubmeshShape]) -> bool:
    """Whether a split shape's option has an effect: a part of one device has no copies of state to save."""
    cheapest = min(one.option for one in plain if one.kind == shape.kind)
    return shape.num_devices > shape.parts or shape.option < cheapest + len(STASH_PRICES)


def _together(costs: Sequence[StageCost]) -> StageCost:
    """The cost of several runs of layers as one stage, which processes one run at a time."""
    sums = {one.name: sum(getattr(cost, one.name) for cost in costs) for one in fields(StageCost)}
    return replace(StageCost(**sums), working_bytes=max(cost.working_bytes for cost in costs))
