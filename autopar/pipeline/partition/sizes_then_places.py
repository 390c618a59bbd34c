"""Find the cheapest stages: first their sizes, then their places.

In: values of runs of layers, and transfers.
Out: `Placed` stages, and a lower bound. The dynamic program finds the cheapest stages by a rule of which submeshes fit
together (`packing.py`), and the stages are placed where their transfers cost least. If that costs what the rule
promised, nothing is cheaper. The coarse rule promises too much only where stages cannot share a host as it assumes.
Then the next finer rule follows, as long as its states are few enough. If none remains, the best placement found
counts, or stages in the order of the devices if these are cheaper, and the gap to the bound stays open.

Where sizes do not nest and the exact rule has too many states, or the cluster has too many kinds of hosts to count
their devices, only stages in the order of the devices are searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from autopar.pipeline.partition.cluster import Cluster, Submesh
from autopar.pipeline.partition.dynamic_program import Combine, Found, Hops, Types, solve
from autopar.pipeline.partition.packing import (
    Counted,
    Exact,
    Footprint,
    Hosted,
    InLine,
    Packing,
    Rule,
    are_nested,
    packing_of,
    placed,
)
from autopar.pipeline.partition.problem import PartitionProblem, Stage

Runs = tuple[tuple[int, int, int], ...]  # first layer, last layer, number of the shape
_ROUNDING = 1e-12  # relative
#: Exact packings of so few states are searched at once; coarser rules would save nothing.
_FEW_STATES = 200
#: A packing has at most so many states, and a dynamic program by a finer rule at most so many additions and bytes.
_MOST_STATES = 4096
_MOST_ADDITIONS, _MOST_BYTES = 3e8, 3e8


@dataclass(frozen=True, slots=True)
class Placed:
    """The cheapest stages that were found.

    Args:
        bound: no stages cost less.
        runs: the stages that have this bound, perhaps without a place.
        cost: the cost of `stages`; `inf` without any.
        stages: stages with their submeshes; empty if none were placed.
    """

    bound: float
    runs: Runs
    cost: float
    stages: tuple[Stage, ...]

    @property
    def is_least(self) -> bool:
        """Whether no stages cost less than these."""
        return bool(self.stages) and self.cost <= self.bound * (1 + _ROUNDING)


class Placer:
    """Finds stages on a cluster.

    Attributes:
        is_in_line: whether only stages in the order of the devices are searched.
    """

    def __init__(self, problem: PartitionProblem, types: Types) -> None:
        self._cluster, self._shapes, self._types = problem.cluster, problem.all_shapes, types
        self._size = problem.num_layers, problem.most_stages + 1
        self._all_devices = problem.all_devices
        exact = self._packing(Exact, _MOST_STATES)
        counted = self._packing(partial(Counted, footprints=types.footprints), _MOST_STATES)
        if exact is not None and exact.num_states <= _FEW_STATES:
            rules = [exact]
        elif counted is not None and are_nested(self._cluster, types.footprints):
            rules = [counted, self._packing(Hosted, _MOST_STATES), exact]
        else:
            rules = [counted, exact] if self._is_affordable(exact) else []
        in_line = self._packing(InLine, math.inf)
        assert in_line is not None
        self.is_in_line, self._in_line = not rules, in_line
        self._rules = [packing for packing in rules or [in_line] if packing is not None]

    def cheapest(
        self,
        values: np.ndarray,
        hops: Hops,
        *,
        combine: Combine = np.add,
        num_stages: int | None = None,
        settles: Callable[[Runs], bool] = lambda _: True,
    ) -> Placed | None:
        """The cheapest stages; arguments as in `dynamic_program.solve`.

        Args:
            settles: whether the values of these runs are final; otherwise no finer rule is tried.

        Returns:
            None if no assignment is feasible.
        """
        best = Placed(0.0, (), math.inf, ())
        for number, packing in enumerate(self._rules):
            if number and not self._is_affordable(packing, values.shape[3], hops.inside.shape[1]):
                continue
            found = self._solve(packing, values, hops, combine, num_stages)
            if found is None:
                return None
            best = self._better(best, found, values, hops, combine)
            if best.is_least or (best.stages and not settles(found.stages)):
                return best
        found = self._solve(self._in_line, values, hops, combine, num_stages)
        if found is not None:
            line = self._better(best, found, values, hops, combine)
            best = Placed(best.bound, best.runs, line.cost, line.stages)
        return best

    def _solve(
        self, packing: Packing, values: np.ndarray, hops: Hops, combine: Combine, num_stages: int | None
    ) -> Found | None:
        return solve(
            packing,
            self._types,
            values,
            hops,
            combine=combine,
            num_stages=num_stages,
            all_devices=self._all_devices,
        )

    def _packing(self, rule: Callable[[Cluster], Rule], most: float) -> Packing | None:
        return _packing_of(self._cluster, self._types.footprints, rule(self._cluster), most)

    def _is_affordable(self, packing: Packing | None, num_counts: int = 0, num_levels: int = 1) -> bool:
        """Whether a dynamic program is small enough; by default one that counts stages."""
        if packing is None:
            return False
        num_layers, most_counts = self._size
        states = packing.num_states * float(num_counts or most_counts)
        additions = states * len(self._shapes) * num_layers * (num_layers + 1) / 2
        num_bytes = 8 * states * len(self._types.shapes) * num_layers * (num_levels + 1)
        return additions <= _MOST_ADDITIONS and num_bytes <= _MOST_BYTES

    def _better(self, best: Placed, found: Found, values: np.ndarray, hops: Hops, combine: Combine) -> Placed:
        """The better of the best stages so far and those of a further rule, with the larger bound."""
        bound, runs = max((best.bound, best.runs), (found.cost, found.stages), key=lambda pair: pair[0])
        cost, stages = self._placed(found.stages, values, hops, combine)
        if cost >= best.cost:
            cost, stages = best.cost, best.stages
        return Placed(bound, runs, cost, stages)

    def _placed(self, runs: Runs, values: np.ndarray, hops: Hops, combine: Combine) -> tuple[float, tuple[Stage, ...]]:
        """The cheapest placement of stages, and its cost; `inf` if there is none."""
        of, counted = self._types.of, values.shape[3] > 1
        sent: list[tuple[float, float]] = []
        for (first, last, shape), (_, _, following) in zip(runs, runs[1:], strict=False):
            at = last + 1, hops.level[first, last, shape], of[shape], of[following]
            sent.append((float(hops.inside[at]), float(hops.across[at])))
        footprints = [self._types.footprints[self._types.footprint[of[shape]]] for _, _, shape in runs]
        where = placed(self._cluster, footprints, sent, lambda a, b: float(combine(np.float64(a), np.float64(b))))
        if where is None:
            return math.inf, ()
        total, places = where
        for number, (first, last, shape) in enumerate(runs):
            own = values[first, last, shape, len(runs) - number if counted else 0]
            total = float(combine(np.float64(total), own))
        stages = (
            Stage(first, last, Submesh(self._shapes[shape], *place))
            for (first, last, shape), place in zip(runs, places, strict=True)
        )
        return total, tuple(stages)


@lru_cache(maxsize=32)
def _packing_of(cluster: Cluster, footprints: tuple[Footprint, ...], rule: Rule, most: float) -> Packing | None:
    """`packing_of`, cached because the searches of a step have the same shapes."""
    return packing_of(cluster, footprints, rule, most)
