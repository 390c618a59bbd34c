"""Make the stage searches of a step, one for each number of microbatches.

In: a step that can be cut, its layers, and a cluster.
Out: `Searches`, which makes a `StageSearch` for a number of microbatches and caches costs between searches. An
`estimate` is a search with scaled costs of another number (`scaled_costs.py`).
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.cut.exchanges import Passing, passing_of
from autopar.pipeline.cut.stage_programs import Cuttable, Layers, StageProgram, layers_between
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.partition.cluster import Cluster, SubmeshShape
from autopar.pipeline.partition.cluster_layers import Clustering, cuts_near
from autopar.pipeline.partition.problem import CostTables, Stage
from autopar.pipeline.search.scaled_costs import ScaledCosts
from autopar.pipeline.search.stage_costs import PlannedRun, StageCosts, at_state_price, likely_shapes
from autopar.pipeline.search.stage_layouts import StageLayouts
from autopar.pipeline.search.stage_search import StagedStep, StageSearch

#: The most places for borders of stages on one side of the chosen ones, together.
_MOST_NEAR = 48


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a chain whose layers do not repeat.

    Args:
        seconds: forward and backward pass of each for one microbatch on one device.
        together: as in `StageCosts`.
    """

    seconds: tuple[float, ...]
    together: tuple[int, ...]


@dataclass
class Searches:
    """The searches of one step.

    Args:
        clustering: the layers, as units of the chain.
        units: the units of the chain, if each has its own price; None if layers repeat, so that they are also the layers of
            `StageCosts`.
        profiles: the hardware profile of each kind of device.
        budget_bytes: the memory budget of a device of each kind.
        time_limit_s: seconds for the partition of one schedule.
        num_stages: the exact number of stages; None for any.
        limit_s: see `StageRequest`.
        layouts: the meshes and shardings of stages that the user fixes.
        planning: options of `StageCosts`.
        costs: costs by number of microbatches.
    """

    cuttable: Cuttable
    clustering: Clustering
    units: Units | None
    cluster: Cluster
    profiles: Mapping[str, HardwareProfile]
    budget_bytes: Mapping[str, float]
    time_limit_s: float
    num_stages: int | None = None
    limit_s: float = math.inf
    layouts: StageLayouts = field(default_factory=StageLayouts)
    planning: Mapping[str, Any] = field(default_factory=dict)
    costs: dict[int, StageCosts] = field(default_factory=dict)
    _shapes: tuple[SubmeshShape, ...] | None = None

    @functools.cached_property
    def _passing(self) -> tuple[Passing, ...]:
        """The values that pass between layers, with the bytes of all microbatches."""
        flow = self.cuttable.flow
        return passing_of(flow, layers_between(self.clustering.starts, len(flow.forward)))

    @property
    def _cut_bytes(self) -> Sequence[float]:
        """The bytes that cross the boundary before each unit; the first is unused."""
        return [0.0, *self.cuttable.chain.cut_bytes]

    @property
    def num_planned(self) -> int:
        """The number of planned runs of layers."""
        return sum(costs.num_planned for costs in self.costs.values())

    def search(self, count: int, among: Sequence[SubmeshShape] | None = None) -> StageSearch:
        """The search for a number of microbatches, on all shapes or on some."""
        costs = self._costs(count)
        if self._shapes is None:  # the bytes of state do not depend on the number of microbatches
            self._shapes = costs.in_options(usable_shapes(self.cluster, self.layouts), self.budget_bytes)
        shapes = self._shapes
        if among is not None:
            plain = {replace(shape, option=0) for shape in among}
            shapes = tuple(shape for shape in shapes if replace(shape, option=0) in plain)
        return self._search_with(count, shapes, costs)

    def estimate(self, count: int, known: int, among: Sequence[SubmeshShape]) -> StageSearch | None:
        """The search for one number of microbatches with scaled costs of a known number, on shapes that were good
        there; None before the first search."""
        if self._shapes is None:
            return None
        costs = ScaledCosts(self.costs[known], self._costs(count))
        planned = set(map(at_state_price, among))
        shapes = tuple(shape for shape in self._shapes if at_state_price(shape) in planned)
        return self._search_with(count, shapes, costs)

    def near(self, stages: Sequence[Stage], window: float) -> Searches | None:
        """The searches with cuts near the borders of these stages alone, to move each; None if layers repeat. They have the
        same costs.

        Args:
            window: how far a border may move, as a share of the time of all units.
        """
        if self.units is None:
            return None
        starts, seconds = self.clustering.starts, self.units.seconds
        chosen = [starts[stage.first] for stage in stages if stage.first]
        window_s = window * sum(seconds)
        near = cuts_near(chosen, seconds, self._cut_bytes, window_s, window_s * len(chosen) / _MOST_NEAR)
        return replace(self, clustering=near, num_stages=len(stages))

    def in_parts(self, step: StagedStep) -> tuple[Searches, StagedStep]:
        """The searches whose layers are what each of these stages rematerializes together, and the step with these layers. It is
        itself where layers repeat."""
        if self.units is None:
            return self, step
        starts, together = self.clustering.starts, self.units.together
        first_of = [starts[stage.first] for stage in step.stages]
        parts = (n for n in range(1, len(together)) if together[n] != together[n - 1])
        layers = tuple(sorted({0, *first_of, *parts}))
        ends = [*(layers.index(first) for first in first_of[1:]), len(layers)]
        stages = tuple(
            replace(stage, first=layers.index(first), last=end - 1)
            for stage, first, end in zip(step.stages, first_of, ends, strict=True)
        )
        found = Clustering.of_unlike(layers, self._cut_bytes)
        return replace(self, clustering=found), replace(step, stages=stages)

    def planned(self, count: int, stages: Sequence[Stage]) -> tuple[tuple[StageProgram, ...], tuple[PlannedRun, ...]]:
        """The programs of stages, and their plans."""
        starts, num_units = self.clustering.starts, len(self.cuttable.chain.units)
        layer_of = [bisect_right(starts, unit) - 1 for unit in range(num_units)]
        stage_of = [s for s, stage in enumerate(stages) for _ in range(stage.first, stage.last + 1)]
        programs = self.cuttable.settled(layer_of, stage_of, count)
        runs = (
            self._costs(count).planned(*self._run(stage.first, stage.last), stage.submesh.shape, program)
            for program, stage in zip(programs, stages, strict=True)
        )
        return programs, tuple(runs)

    def _run(self, first: int, last: int) -> tuple[int, int]:
        """The first and last layer of `StageCosts` that these layers are."""
        return self._borders[first], self._borders[last + 1] - 1

    @functools.cached_property
    def _borders(self) -> tuple[int, ...]:
        """The first layer of `StageCosts` of each layer, and the end of the last."""
        if self.units is None:
            return tuple(range(len(self.clustering.starts) + 1))
        return *self.clustering.starts, len(self.units.seconds)

    def _costs(self, count: int) -> StageCosts:
        if count not in self.costs:
            starts, keys, together = self.clustering.starts, self.clustering.keys, None
            if self.units is not None:  # each unit is a layer
                starts = keys = tuple(range(len(self.units.seconds)))
                together = self.units.together
            layers = self.cuttable.layers(starts, count)
            keys = keys_with_pins(keys, layers, self.layouts)
            options = {"together": together, "splits_backward": True, "layouts": self.layouts, **self.planning}
            self.costs[count] = StageCosts(layers, self.profiles, keys, **options)
        return self.costs[count]

    def _search_with(
        self, count: int, shapes: tuple[SubmeshShape, ...], costs: StageCosts | ScaledCosts
    ) -> StageSearch:
        borders = self._borders
        return StageSearch(
            cost=lambda first, last, shape: costs.cost(*self._run(first, last), shape),
            alone=costs.alone,
            bound=lambda first, last, shape: costs.bound(*self._run(first, last), shape),
            tables=CostTables(lambda shape: costs.table(borders, shape), lambda shape: costs.bounds(borders, shape)),
            keys=self.clustering.keys if self.units is not None else self._costs(count).keys,
            passing=[replace(one, num_bytes=one.num_bytes / count) for one in self._passing],
            trains=bool(self.cuttable.flow.backward),
            cluster=self.cluster,
            profiles=self.profiles,
            budget_bytes=self.budget_bytes,
            shapes=shapes,
            num_microbatches=count,
            num_stages=self.num_stages,
            time_limit_s=self.time_limit_s,
            limit_s=self.limit_s,
        )


def usable_shapes(cluster: Cluster, layouts: StageLayouts) -> tuple[SubmeshShape, ...]:
    """The shapes of submeshes to search: those that a given mesh, or the pins, fit; else the likely ones."""
    shapes = cluster.shapes() if layouts.is_one_mesh else likely_shapes(cluster)
    return tuple(shape for shape in shapes if layouts.may_use(shape.num_devices))


def keys_with_pins(keys: Sequence[int], layers: Layers, layouts: StageLayouts) -> tuple[int, ...]:
    """Keys of layers, equal only where the arguments that layers read are also pinned alike."""
    if not layouts.pins:
        return tuple(keys)
    trace, inputs = layers.trace, layers.cut.inputs
    pinned = {
        value: (layouts.pins[leaf.position].dims, _without_layers(trace.avals[value].shape, leaf.rows))
        for value, leaf in zip(trace.inputs, inputs, strict=True)
        if leaf.position in layouts.pins
    }
    read: list[set[int]] = [set() for _ in keys]
    for equation in trace.equations:
        if equation.layer is not None:
            read[equation.layer].update(pinned.keys() & equation.reads)
    numbers: dict[Hashable, int] = {}
    pins = (tuple(sorted(map(repr, (pinned[value] for value in values)))) for values in read)
    return tuple(numbers.setdefault(one, len(numbers)) for one in zip(keys, pins, strict=True))


def _without_layers(shape: tuple[int, ...], rows: Rows | None) -> tuple[int, ...]:
    return tuple(size for dim, size in enumerate(shape) if rows is None or dim != rows.dim)
