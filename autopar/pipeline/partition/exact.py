"""Partition layers into stages on submeshes, proven optimal, by dynamic programming over the free devices.

In: a `PartitionProblem`.
Out: a `Partition`. Under a limit on `repeated`, the dynamic program finds the least sum of `once`, and then a place for
each submesh (`sizes_then_places.py`). The search (`bottleneck.py`) finds the limit and queries costs as late as
possible (`price_tables.py`). Stages need not be in the order of the devices; where that order is as good, they are.
Devices stay idle only if that lowers the objective: ties prefer larger submeshes.

The memory of a stage depends on the number of stages after it. Counting stages makes the dynamic program that many
times larger, so stages are counted only if the cheapest partition without the count does not fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import ClusterError
from autopar.pipeline.partition.bottleneck import PROVEN, Budget, Progress, Stages, searched
from autopar.pipeline.partition.dynamic_program import Hops
from autopar.pipeline.partition.price_tables import Prices, Run
from autopar.pipeline.partition.problem import Partition, PartitionProblem, Shortage
from autopar.pipeline.partition.sizes_then_places import Placed, Placer
from autopar.pipeline.partition.transfer_tables import Transfers
from autopar.solve.problem import Status

_AMONG = "all cuts between layers and all placements of the priced submeshes"
_IN_LINE = "stages in the order of the devices"


@dataclass(frozen=True, slots=True)
class ExactPartitioner:
    """The default `Partitioner`.

    Args:
        time_limit_s: seconds after which the best partition so far is returned, with its bound. Ctrl-C does the same.
        progress: a callback with the best cost and the lower bound, in seconds, when either changes.
        relative_gap: the gap between cost and bound at which the search ends.
    """

    time_limit_s: float = math.inf
    progress: Progress | None = None
    relative_gap: float = PROVEN

    def partition(self, problem: PartitionProblem) -> Partition:
        """Find the cheapest partition.

        Raises:
            ClusterError: there are fewer devices than requested stages.
            KeyboardInterrupt: Ctrl-C before any partition was found.
        """
        if problem.num_stages is not None and problem.num_stages > problem.most_stages:
            raise ClusterError(
                f"{problem.num_stages} stages were requested, but {problem.num_layers} layers on"
                f" {problem.cluster.num_devices} devices make at most {problem.most_stages}: choose 1 to {problem.most_stages}"
            )
        prices, transfers = Prices(problem), Transfers(problem)
        placer = Placer(problem, transfers.types)
        variants = [_Variant(placer, prices, transfers, count) for count in _num_stages(problem)]
        budget = Budget(time.monotonic() + self.time_limit_s, self.relative_gap, problem.limit_s)
        search = searched(variants, prices, budget, self.progress)
        reason, shortage = "", None
        if search.status is Status.INFEASIBLE:
            shortage = _least_shortage(variants)
            reason = str(shortage) if shortage else _unplaced(prices)
            reason += f" (searched: {_IN_LINE})" if placer.is_in_line else ""
        return Partition(
            stages=search.best,
            cost_s=search.cost,
            lower_bound_s=math.inf if search.status is Status.INFEASIBLE else search.bound,
            status=search.status,
            num_queries=prices.num_queries,
            others=search.others(),
            reason=reason,
            shortage=shortage,
            slack_s=prices.slack_s,
            among=_IN_LINE if placer.is_in_line else _AMONG,
        )


def _num_stages(problem: PartitionProblem) -> list[int | None]:
    """The numbers of stages to search one by one: the requested one, or all that the schedule can have if it cannot have
    all, or if the in-flight microbatches depend on the number; [None] if a single search covers all numbers."""
    in_flight, most = problem.objective.in_flight, problem.most_stages
    every = range(1, most + 1) if problem.num_stages is None else [problem.num_stages]
    allowed = [count for count in every if problem.may_have(count)]
    if problem.num_stages is not None or len(allowed) < most:
        return list(allowed)
    for after in range(most):
        if len({in_flight(after, count) for count in range(after + 1, most + 1)}) > 1:
            return list(allowed)
    return [None]


@dataclass(slots=True)
class _Variant:
    """All partitions with a given number of stages, or any number."""

    placer: Placer
    prices: Prices
    transfers: Transfers
    num_stages: int | None
    _in_flight: np.ndarray = field(init=False)  # by the number of stages from one to the end; entry 0 is unused

    def __post_init__(self) -> None:
        problem = self.prices.problem
        total = self.num_stages or problem.most_stages  # no stage has more of them to the end
        counts = range(1, problem.most_stages + 1)
        flights = [problem.objective.in_flight(min(n, total) - 1, total) for n in counts]
        self._in_flight = np.array([flights[0], *flights], float)

    def cheapest(self, limit: float) -> tuple[float, Stages | None] | None:
        """See `bottleneck.Variant`."""
        while True:
            found = self._placed(limit)
            if found is None:
                return None
            is_open = bool(found.stages) and not self._are_known(self.prices.runs(found.stages))
            if found.is_least or is_open or not self.prices.query(found.runs):
                return found.bound, found.stages or None

    def least_limit(self) -> float:
        """See `bottleneck.Variant`; transfers and the number of stages are ignored."""
        prices = self.prices
        fitting = prices.fitting(np.array([self._in_flight.min()]))
        values = np.where(fitting, prices.repeated[..., None], np.inf)
        found = self.placer.cheapest(values, self._free(), combine=np.maximum, settles=lambda _: False)
        return math.inf if found is None else found.bound

    def query(self, stages: Stages) -> bool:
        """See `bottleneck.Variant`."""
        return self.prices.query(self.prices.runs(stages))

    def figures(self, stages: Stages) -> tuple[float, float]:
        """See `bottleneck.Variant`."""
        return self.prices.figures(stages)

    def least_shortage(self) -> tuple[float, Shortage] | None:
        """The partition whose worst stage lacks the least memory, and that stage; None if a layer has no submesh."""
        prices = self.prices
        while True:
            lacking = np.maximum(prices.holding(self._in_flight) - prices.budget[:, None], 0.0)
            lacking = np.where(np.isfinite(prices.once)[..., None], lacking, np.inf)
            found = self.placer.cheapest(lacking, self._free(), combine=np.maximum, num_stages=self.num_stages)
            if found is None or not found.stages:
                return None
            if not self.query(found.stages):
                break
        worst, shortage, stages = -math.inf, None, found.stages
        is_least = found.is_least and not self.placer.is_in_line
        for number, (stage, run) in enumerate(zip(stages, prices.runs(stages), strict=True)):
            in_flight = float(self._in_flight[len(stages) - number])
            needed, budget = prices.holds(run, in_flight), float(prices.budget[run[2]])
            if needed - budget > worst:
                worst, shortage = needed - budget, Shortage(stage, in_flight, needed, budget, is_least)
        assert shortage is not None
        return found.cost, shortage

    def _placed(self, limit: float) -> Placed | None:
        """The least sum under a limit; None if it is infeasible."""
        prices = self.prices
        hops, above = self.transfers.hops(prices.repeated, limit)
        once = np.where(above, np.inf, prices.once)[..., None]
        if self.num_stages is None:
            least = np.array([self._in_flight.min()])
            found = self.placer.cheapest(np.where(prices.fitting(least), once, np.inf), hops, settles=self._are_known)
            if found is None or (found.stages and self._all_fit(found.stages)):
                return found
        values = np.where(prices.fitting(self._in_flight), once, np.inf)
        return self.placer.cheapest(values, hops, num_stages=self.num_stages, settles=self._are_known)

    def _are_known(self, runs: Iterable[Run]) -> bool:
        return all(self.prices.known[run] for run in runs)

    def _all_fit(self, stages: Stages) -> bool:
        count = len(stages)
        return count < len(self._in_flight) and all(
            self.prices.fits(run, self._in_flight[count - number])
            for number, run in enumerate(self.prices.runs(stages))
        )

    def _free(self) -> Hops:
        return Hops.free(self.prices.problem.num_layers, self.transfers.types)


def _least_shortage(variants: list[_Variant]) -> Shortage | None:
    found = [shortage for variant in variants if (shortage := variant.least_shortage()) is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _unplaced(prices: Prices) -> str:
    """Why no partition exists with unlimited memory."""
    nowhere = [
        layer for layer in range(prices.problem.num_layers) if not np.isfinite(prices.once[: layer + 1, layer:]).any()
    ]
    if nowhere:
        return f"no submesh of {prices.problem.cluster} can run layer {nowhere[0]}"
    return f"no way to cut the layers leaves every stage a submesh of {prices.problem.cluster} that can run it"
