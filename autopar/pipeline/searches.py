"""The searches for the stages of one step, one for each number of microbatches.

In: a step that may be cut, its layers, a cluster. Out: `Searches`, which makes a `StageSearch` of a number of microbatches;
prices are kept from search to search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost.hardware import HardwareProfile
from autopar.pipeline.cluster import Cluster, SubmeshShape
from autopar.pipeline.clustering import Clustering
from autopar.pipeline.cutting import Cuttable
from autopar.pipeline.search import StageSearch
from autopar.pipeline.stage_costs import StageCosts, likely_shapes


@dataclass(slots=True)
class Searches:
    """What is looked for.

    Args:
        profiles: by kind of device.
        budget_bytes: what a device of each kind may hold.
        time_limit_s: seconds for the partition of one schedule.
        num_stages: exactly so many; None: any number.
        planning: options of `StageCosts`.
        costs: prices, by number of microbatches.
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

    @property
    def num_planned(self) -> int:
        """How many runs of layers have been planned."""
        return sum(costs.num_planned for costs in self.costs.values())

    def search(self, count: int, among: Sequence[SubmeshShape] | None = None) -> StageSearch:
        """That of a number of microbatches, on all shapes or on some."""
        starts, keys = self.clustering.starts, self.clustering.keys
        if count not in self.costs:
            layers = self.cuttable.layers(starts, count)
            self.costs[count] = StageCosts(layers, self.profiles, keys, splits_backward=True, **self.planning)
        costs, cuts = self.costs[count], [0.0, *self.cuttable.chain.cut_bytes]
        shapes = costs.in_options(likely_shapes(self.cluster), self.budget_bytes)
        if among is not None:
            plain = {replace(shape, option=0) for shape in among}
            shapes = tuple(shape for shape in shapes if replace(shape, option=0) in plain)
        return StageSearch(
            cost=costs.cost,
            keys=keys,
            boundary_bytes=[cuts[start] / count for start in starts],
            cluster=self.cluster,
            profiles=self.profiles,
            budget_bytes=self.budget_bytes,
            shapes=shapes,
            num_microbatches=count,
            num_stages=self.num_stages,
            alone=costs.alone,
            bound=costs.bound,
            time_limit_s=self.time_limit_s,
        )
