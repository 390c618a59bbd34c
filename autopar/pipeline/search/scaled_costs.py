"""Scale the costs of runs to another number of microbatches from one planned layer.

In: the costs for one number of microbatches, and one cost for another.
Out: `ScaledCosts`. Each field of every cost is scaled by the factor of one cost (`StageCosts.reference`). This is accurate
enough to choose the numbers worth a full search, and needs a tenth of its plans.
"""

from __future__ import annotations

from dataclasses import fields

from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.stage_costs import StageCosts


class ScaledCosts:
    """`StageCosts` scaled in proportion.

    Args:
        known: costs for one number of microbatches.
        other: costs for the other number; only its `reference` is planned.
    """

    def __init__(self, known: StageCosts, other: StageCosts) -> None:
        self.known, self.other = known, other
        self._factors: dict[tuple[SubmeshShape, bool], dict[str, float]] = {}
        self._costs: dict[tuple[tuple[int, ...], SubmeshShape], StageCost] = {}
        self._bounds: dict[tuple[tuple[int, ...], SubmeshShape], StageCost] = {}

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        """The scaled `StageCosts.cost`."""
        key = (self.known.kind_of(first, last), shape)
        if key not in self._costs:
            self._costs[key] = self._scaled(self.known.cost(first, last, shape), shape, alone=False)
        return self._costs[key]

    def alone(self, shape: SubmeshShape) -> StageCost:
        """The scaled `StageCosts.alone`."""
        return self._scaled(self.known.alone(shape), shape, alone=True)

    def bound(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        """The scaled `StageCosts.bound`, by that cost on one device."""
        key = (self.known.kind_of(first, last), shape)
        if key not in self._bounds:
            one = SubmeshShape(shape.kind, 1, 1, option=shape.option)
            self._bounds[key] = self._scaled(self.known.bound(first, last, shape), one, alone=False)
        return self._bounds[key]

    def table(self, borders: tuple[int, ...], shape: SubmeshShape) -> StageCost:
        """The scaled `StageCosts.table`."""
        return self._scaled(self.known.table(borders, shape), shape, alone=False)

    def bounds(self, borders: tuple[int, ...], shape: SubmeshShape) -> StageCost:
        """The scaled `StageCosts.bounds`."""
        one = SubmeshShape(shape.kind, 1, 1, option=shape.option)
        return self._scaled(self.known.bounds(borders, shape), one, alone=False)

    def _scaled(self, cost: StageCost, shape: SubmeshShape, *, alone: bool) -> StageCost:
        if (shape, alone) not in self._factors:
            here = self.known.reference(shape, alone=alone)
            there = self.other.reference(shape, alone=alone)
            self._factors[shape, alone] = {
                field.name: getattr(there, field.name) / getattr(here, field.name) if getattr(here, field.name) else 1.0
                for field in fields(StageCost)
            }
        return StageCost(**{name: factor * getattr(cost, name) for name, factor in self._factors[shape, alone].items()})
