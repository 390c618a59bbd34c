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
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

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

_RuleOf = Callable[[Cluster], Rule]
Runs = tuple[tuple[int, int, int], ...]  # first layer, last layer, number of the shape
_ROUNDING = 1e-12  # relative
#: Exact packings of so few states are searched at once; coarser rules would save nothing.
_FEW_STATES = 200
#: A packing has at most so many states.
_MOST_STATES, _MOST_STATES_COUNTED = 4096, 16384
#: A dynamic program has at most so many bytes, and so many additions; by the first rule, more.
_MOST_BYTES = 3e8
_MOST_ADDITIONS, _MOST_ADDITIONS_FIRST = 3e8, 2e9


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
        in_line = self._packing(InLine)
        assert in_line is not None
        self._in_line = in_line
        self._rules = self._rules_of(problem.cluster)
        self.is_in_line = InLine in self._rules

    def _rules_of(self, cluster: Cluster) -> Sequence[_RuleOf]:
        """The rules to search by, the coarsest first."""
        if self._packing(Exact, _FEW_STATES) is not None:
            return (Exact,)
        counted = partial(Counted, footprints=self._types.footprints)
        packing = self._packing(counted)
        if packing is None:
            return (InLine,)
        if not are_nested(cluster, self._types.footprints):
            return (counted, Exact) if self._is_affordable(self._packing(Exact), _MOST_ADDITIONS) else (InLine,)
        few = packing.num_states <= 2 * self._in_line.num_states
        return (counted, Hosted, Exact) if few or self._is_affordable(packing, _MOST_ADDITIONS_FIRST) else (InLine,)

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
        for number, rule in enumerate(self._rules):
            packing = self._packing(rule)
            if number and not self._is_affordable(packing, _MOST_ADDITIONS, values.shape[3], hops.inside.shape[1]):
                continue
            assert packing is not None
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

    def _packing(self, rule: _RuleOf, most: float | None = None) -> Packing | None:
        """The packing by a rule; None if it has too many states."""
        if most is None:
            most = {Hosted: _MOST_STATES, Exact: _MOST_STATES, InLine: math.inf}.get(rule, _MOST_STATES_COUNTED)
        return _packing_of(self._cluster, self._types.footprints, rule(self._cluster), most)

    def _is_affordable(
        self, packing: Packing | None, most_additions: float, num_counts: int = 0, num_levels: int = 1
    ) -> bool:
        """Whether a dynamic program is small enough; by default one that counts stages."""
        if packing is None:
            return False
        num_layers, most_counts = self._size
        states = packing.num_states * float(num_counts or most_counts)
        additions = states * len(self._shapes) * num_layers * (num_layers + 1) / 2
        num_bytes = 8 * states * len(self._types.shapes) * num_layers * (num_levels + 1)
        return additions <= most_additions and num_bytes <= _MOST_BYTES

    def _better(self, best: Placed, found: Found, values: np.ndarray, hops: Hops, combine: Combine) -> Placed:
        """The better of the best stages so far and those of a further rule, with the larger bound."""
        bound, runs = (found.cost, found.stages) if found.cost >= best.bound else (best.bound, best.runs)
        cost, stages = self._placed(found.stages, values, hops, combine)
        if cost >= best.cost:
            cost, stages = best.cost, best.stages
        return Placed(bound, runs, cost, stages)

    def _placed(self, runs: Runs, values: np.ndarray, hops: Hops, combine: Combine) -> tuple[float, tuple[Stage, ...]]:
        """The cheapest placement of stages, and its cost; `inf` if there is none."""
        of, counted = self._types.of, values.shape[3] > 1
        scalars: Callable[[float, float], float] = max if combine is np.maximum else operator.add
        sent: list[tuple[float, float]] = []
        for (first, last, shape), (_, _, following) in pairwise(runs):
            at = last + 1, hops.level[first, last, shape], of[shape], of[following]
            sent.append((float(hops.inside[at]), float(hops.across[at])))
        footprints = [self._types.footprints[self._types.footprint[of[shape]]] for _, _, shape in runs]
        where = placed(self._cluster, footprints, sent, scalars)
        if where is None:
            return math.inf, ()
        total, places = where
        for number, (first, last, shape) in enumerate(runs):
            own = values[first, last, shape, len(runs) - number if counted else 0]
            total = scalars(total, float(own))
        stages = (
            Stage(first, last, Submesh(self._shapes[shape], *place))
            for (first, last, shape), place in zip(runs, places, strict=True)
        )
        return total, tuple(stages)


@lru_cache(maxsize=32)
def _packing_of(cluster: Cluster, footprints: tuple[Footprint, ...], rule: Rule, most: float) -> Packing | None:
    """`packing_of`, cached because the searches of a step have the same shapes."""
    return packing_of(cluster, footprints, rule, most)
