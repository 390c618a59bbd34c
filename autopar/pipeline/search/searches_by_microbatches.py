"""Make the stage searches of a step, one for each number of microbatches.

In: a step that can be cut, its layers, and a cluster.
Out: `Searches`, which makes a `StageSearch` for a number of microbatches and caches costs between searches. An
`estimate` is a search with scaled costs of another number (`scaled_costs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, SubmeshShape
from autopar.pipeline.partition.cluster_layers import Clustering
from autopar.pipeline.search.scaled_costs import ScaledCosts
from autopar.pipeline.search.stage_costs import StageCosts, at_state_price, likely_shapes
from autopar.pipeline.search.stage_search import StageSearch


@dataclass(slots=True)
class Searches:
    """The searches of one step.

    Args:
        profiles: the hardware profile of each kind of device.
        budget_bytes: the memory budget of a device of each kind.
        time_limit_s: seconds for the partition of one schedule.
        num_stages: the exact number of stages; None for any.
        planning: options of `StageCosts`.
        costs: costs by number of microbatches.
    """

    cuttable: Cuttable
    clustering: Clustering
    cluster: Cluster
    profiles: Mapping[str, HardwareProfile]
    budget_bytes: Mapping[str, float]
    time_limit_s: float
    num_stages: int | None = None
    planning: Mapping[str, Any] = field(default_factory=dict)
    costs: dict[int, StageCosts] = field(default_factory=dict)
    _shapes: tuple[SubmeshShape, ...] | None = None

    @property
    def num_planned(self) -> int:
        """The number of planned runs of layers."""
        return sum(costs.num_planned for costs in self.costs.values())

    def search(self, count: int, among: Sequence[SubmeshShape] | None = None) -> StageSearch:
        """The search for a number of microbatches, on all shapes or on some."""
        costs = self._costs(count)
        if self._shapes is None:  # the bytes of state do not depend on the number of microbatches
            self._shapes = costs.in_options(likely_shapes(self.cluster), self.budget_bytes)
        shapes = self._shapes
        if among is not None:
            plain = {replace(shape, option=0) for shape in among}
            shapes = tuple(shape for shape in shapes if replace(shape, option=0) in plain)
        return self._search_with(count, shapes, cost=costs.cost, alone=costs.alone, bound=costs.bound)

    def estimate(self, count: int, known: int, among: Sequence[SubmeshShape]) -> StageSearch | None:
        """The search for one number of microbatches with scaled costs of a known number, on shapes that were good
        there; None if no layer is representative."""
        if self.costs[known].usual is None or self._shapes is None:
            return None
        costs = ScaledCosts(self.costs[known], self._costs(count))
        planned = set(map(at_state_price, among))
        shapes = tuple(shape for shape in self._shapes if at_state_price(shape) in planned)
        return self._search_with(count, shapes, cost=costs.cost, alone=costs.alone, bound=costs.bound)

    def _costs(self, count: int) -> StageCosts:
        if count not in self.costs:
            layers, keys = self.cuttable.layers(self.clustering.starts, count), self.clustering.keys
            self.costs[count] = StageCosts(layers, self.profiles, keys, splits_backward=True, **self.planning)
        return self.costs[count]

    def _search_with(self, count: int, shapes: tuple[SubmeshShape, ...], **prices: Any) -> StageSearch:
        cuts = [0.0, *self.cuttable.chain.cut_bytes]
        return StageSearch(
            **prices,
            keys=self.clustering.keys,
            boundary_bytes=[cuts[start] / count for start in self.clustering.starts],
            cluster=self.cluster,
            profiles=self.profiles,
            budget_bytes=self.budget_bytes,
            shapes=shapes,
            num_microbatches=count,
            num_stages=self.num_stages,
            time_limit_s=self.time_limit_s,
        )
