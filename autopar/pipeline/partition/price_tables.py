"""Store the costs of stages in tables: exact if queried, optimistic otherwise.

In: a `PartitionProblem`.
Out: `Prices`. For every run of layers and every shape its tables have the cost or a lower bound, from the problem's
`bound` and from what `growth` infers from known costs. A partition that is optimal by these tables and whose costs were
all queried is optimal. So a search queries only the stages of partitions that look best.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.partition.problem import Growth, PartitionProblem, Stage, StageCost

Run = tuple[int, int, int]  # first layer, last layer, number of the shape
ROUNDING = 1e-12  # relative
_HALVINGS = 20
_MARGIN = 1.1


class Prices:
    """Tables over first layer, last layer and shape; float[layers, layers, shapes], `inf` if a run is impossible.

    Attributes:
        once, repeated: the objective's seconds of a stage, without transfers.
        state, working, flight: bytes held always, while working, and per in-flight microbatch.
        known: whether each cost is known.
        num_queries: the number of queried costs; equal runs count once.
        overstated: whether a cost was below its bound by `growth`.
        budget: bytes per device; float[shapes].
    """

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem, self.shapes = problem, problem.all_shapes
        n, num_shapes = problem.num_layers, len(self.shapes)
        self._number = {shape: index for index, shape in enumerate(self.shapes)}
        self.budget = np.array([problem.budget_bytes[shape.kind] for shape in self.shapes], float)
        self._empty = empty = np.arange(n)[:, None] > np.arange(n)
        self.once, self.repeated, self.state, self.working, self.flight = (
            np.where(empty[:, :, None], np.inf, np.zeros((n, n, num_shapes))) for _ in range(5)
        )
        self._tables = (self.once, self.repeated, self.state, self.working, self.flight)
        self._base = tuple(table.copy() for table in self._tables)  # bounds without `growth`
        self.known = np.zeros((n, n, num_shapes), bool)
        self.num_queries = 0
        self._all = list(range(num_shapes))
        self.overstated = False
        self._slack = np.zeros((len(self._tables), num_shapes))
        self._costs: dict[Run, StageCost | None] = {}
        self._equal = _equal_runs(n, problem.layer_keys)
        self._bound_all()

    # -- queries ---------------------------------------------------------------------------------

    def query(self, runs: Iterable[Run]) -> bool:
        """Query the costs of runs. Return whether any was unknown before."""
        new = {run for run in runs if not self.known[run]}
        if self.problem.tables is not None:
            for shape in {shape for _, _, shape in new}:
                self._query_all(shape)
            return bool(new)
        if self.problem.together:
            shapes, n = {shape for _, _, shape in new}, self.problem.num_layers
            new = {
                (i, j, shape) for shape in shapes for i in range(n) for j in range(i, n) if not self.known[i, j, shape]
            }
        for first, last, shape in sorted(new):
            if not self.known[first, last, shape]:
                self._query(first, last, shape)
        if new:
            self._infer(sorted({shape for _, _, shape in new}))
        return bool(new)

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        """One cost, queried if unknown."""
        run = first, last, self._number[shape]
        if run not in self._costs:
            self._query(*run)
        return self._costs[run]

    def _query_all(self, shape: int) -> None:
        assert self.problem.tables is not None
        self._put_all(shape, self.problem.tables.cost(self.shapes[shape]))
        self.known[..., shape] = ~self._empty
        self.num_queries += len({id(runs) for runs in self._equal.values()})

    def _put_all(self, shape: int, costs: StageCost) -> None:
        objective = self.problem.objective
        times = objective.once_s(costs), objective.repeated_s(costs)
        figures = (*times, costs.state_bytes, costs.working_bytes, costs.flight_bytes)
        for table, figure in zip(self._tables, figures, strict=True):
            table[..., shape] = np.where(self._empty, np.inf, figure)

    def _query(self, first: int, last: int, shape: int) -> None:
        if self.problem.tables is not None:
            self._query_all(shape)
            return
        cost = self.problem.cost(first, last, self.shapes[shape])
        self.num_queries += 1
        before = [float(table[first, last, shape]) for table in self._tables]
        for one, other in self._equal[first, last]:
            self._costs[one, other, shape] = cost
            self.known[one, other, shape] = True
            self._put(one, other, shape, cost)
        if cost is not None:
            for table, base, bound in zip(self._tables, self._base, before, strict=True):
                inferred = bound > base[first, last, shape]
                self.overstated |= inferred and float(table[first, last, shape]) < bound * (1 - ROUNDING)

    def _put(self, first: int, last: int, shape: int, cost: StageCost | None) -> None:
        at, objective = (first, last, shape), self.problem.objective
        if cost is None:
            self.once[at] = self.repeated[at] = np.inf
            return
        self.once[at], self.repeated[at] = objective.once_s(cost), objective.repeated_s(cost)
        self.state[at], self.working[at], self.flight[at] = cost.state_bytes, cost.working_bytes, cost.flight_bytes

    # -- bounds ----------------------------------------------------------------------------------

    def loosen(self) -> None:
        """Weaken `growth`: allow merging two runs to save slightly more than any known costs show."""
        for number in range(len(self._tables)):
            none, most = np.zeros(len(self.shapes)), self._saved(number, np.zeros(len(self.shapes)))
            if not most.any():
                continue
            for _ in range(_HALVINGS):  # bisect the least saving that no known cost contradicts
                middle = (none + most) / 2
                holds = self._saved(number, middle) <= 0
                none, most = np.where(holds, none, middle), np.where(holds, middle, most)
            self._slack[number] = np.maximum(self._slack[number], _MARGIN * most)
        self.overstated = False
        self._infer(self._all)

    @property
    def slack_s(self) -> float:
        """The largest saving that the bounds allow for merging two runs of layers, on any submesh, in seconds of the
        objective."""
        return float(self._slack[:2].max())

    def _saved(self, number: int, slack: np.ndarray) -> np.ndarray:
        """The largest difference by which known costs fall below their bounds by `growth`, by shape."""
        table = self._tables[number]
        inferred = self._inferred(number, slack, self._all)
        known = self.known & np.isfinite(inferred) & np.isfinite(table)
        excess = np.where(known, inferred, 0.0) - np.where(known, table, 0.0)
        return np.where(excess > ROUNDING * np.where(known, table, 0.0), excess, 0.0).max(axis=(0, 1), initial=0.0)

    def _bound_all(self) -> None:
        """Initialize the tables with the problem's bounds; without bounds, query costs."""
        n, bound, tables = self.problem.num_layers, self.problem.bound, self.problem.tables
        if tables is not None:
            for number, shape in enumerate(self.shapes):
                self._put_all(number, tables.bound(shape))
        elif bound is not None:
            for i, j, c in self._every_run():
                self._put(i, j, c, bound(i, j, self.shapes[c]))
                for base, table in zip(self._base, self._tables, strict=True):
                    base[i, j, c] = table[i, j, c]
            self._infer(self._all)
        elif self.problem.growth is Growth.UNKNOWN:
            self.query(self._every_run())
        else:
            self.query([(i, i, c) for i in range(n) for c in range(len(self.shapes))])

    def _every_run(self) -> list[Run]:
        n = self.problem.num_layers
        return [(i, j, c) for i in range(n) for j in range(i, n) for c in range(len(self.shapes))]

    def _infer(self, shapes: list[int]) -> None:
        """Update the bounds of runs on these shapes from those of shorter runs."""
        if self.problem.growth is Growth.UNKNOWN:
            return
        known = self.known[..., shapes]
        for number, (table, base) in enumerate(zip(self._tables, self._base, strict=True)):
            inferred = np.maximum(base[..., shapes], self._inferred(number, self._slack[number, shapes], shapes))
            table[..., shapes] = np.where(known, table[..., shapes], inferred)

    def _inferred(self, number: int, slack: np.ndarray, shapes: list[int]) -> np.ndarray:
        """The bounds of all runs on some shapes from those of shorter ones.

        Args:
            number: the number of the table.
            slack: the most that merging two runs may save; float[shapes].
        """
        adds = np.array([self.shapes[shape].parts == 1 for shape in shapes])  # parts of a submesh work in parallel
        adds &= self.problem.growth is Growth.SUPERADDITIVE and self._tables[number] is not self.working
        table, base, known = (t[..., shapes] for t in (self._tables[number], self._base[number], self.known))
        start = np.where(known, table, base)
        found = np.zeros(start.shape)
        loops = importlib.import_module("autopar.pipeline.partition.dynamic_program_numba")
        loops.from_shorter(start, known, adds, slack, start.copy(), found)
        return found

    # -- a partition -----------------------------------------------------------------------------

    def runs(self, stages: Sequence[Stage]) -> list[Run]:
        """The table entries of stages."""
        return [(stage.first, stage.last, self._number[stage.submesh.shape]) for stage in stages]

    def holds(self, run: Run, in_flight: float) -> float:
        """Bytes per device, by the tables."""
        return float(self.state[run] + self.working[run] + in_flight * self.flight[run])

    def fits(self, run: Run, in_flight: float) -> bool:
        """Whether a run with so many in-flight microbatches is within the budget, except for rounding."""
        return self.holds(run, in_flight) <= self.budget[run[2]] * (1 + ROUNDING)

    def fitting(self, in_flight: np.ndarray, shapes: slice = slice(None)) -> np.ndarray:
        """`fits` for all runs on some shapes and each of these numbers: bool[layers, layers, shapes, numbers]."""
        return self.holding(in_flight, shapes) <= (self.budget[shapes] * (1 + ROUNDING))[:, None]

    def holding(self, in_flight: np.ndarray, shapes: slice = slice(None)) -> np.ndarray:
        """Bytes per device of all runs on some shapes with each of these numbers: float[layers, layers, shapes, numbers]."""
        state, working, flight = (table[:, :, shapes, None] for table in (self.state, self.working, self.flight))
        return state + working + flight * in_flight

    def figures(self, stages: Sequence[Stage]) -> tuple[float, float]:
        """The sum of `once` and the largest `repeated` by the tables, with transfers; memory is ignored."""
        objective, transfer_s = self.problem.objective, self.problem.transfer_s
        total, largest = 0.0, 0.0
        for number, (stage, run) in enumerate(zip(stages, self.runs(stages), strict=True)):
            sent = 0.0
            if number + 1 < len(stages):
                mesh, following = stage.submesh, stages[number + 1].submesh
                sent = transfer_s(stage.last + 1, mesh.shape, following.shape, mesh.shares_host(following))
            total += float(self.once[run]) + objective.transfer_once * sent
            largest = max(largest, float(self.repeated[run]) + objective.transfer_repeated * sent)
        return total, largest

    def evaluate(self, stages: Sequence[Stage]) -> float:
        """The objective of a chain of stages, with all costs queried; `inf` if a stage does not fit."""
        runs = self.runs(stages)
        for run in runs:
            if not self.known[run]:
                self._query(*run)
        in_flight = self.problem.objective.in_flight
        for number, run in enumerate(runs):
            if not self.fits(run, in_flight(len(stages) - 1 - number, len(stages))):
                return float("inf")
        return sum(self.figures(stages))


def _equal_runs(num_layers: int, keys: Sequence[Hashable] | None) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each run, all runs of equal layers."""
    numbers: dict[Hashable, int] = {}
    layers = [numbers.setdefault(key, len(numbers)) for key in (range(num_layers) if keys is None else keys)]
    equal: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first in range(num_layers):
        for last in range(first, num_layers):
            members = equal.setdefault(tuple(layers[first : last + 1]), [])
            members.append((first, last))
            found[first, last] = members
    return found
