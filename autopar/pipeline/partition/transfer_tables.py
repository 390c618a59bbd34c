"""Tabulate the seconds of transfers between stages, and the transfers that a limit forbids.

In: a `PartitionProblem`.
Out: `Transfers`; for a limit, the `Hops` of the dynamic program. A run whose own time is close to the limit may only
use fast transfers.
"""

from __future__ import annotations

import numpy as np

from autopar.pipeline.partition.dynamic_program import Hops, Types
from autopar.pipeline.partition.problem import PartitionProblem


class Transfers:
    """Tables over the target's first layer and the types of source and target; seconds of one microbatch.

    Attributes:
        types: the types of the problem's shapes.
        inside: seconds in one host, `inf` if the two types do not fit into one host; float[layers, types, types].
        across: seconds otherwise; float[layers, types, types].
    """

    def __init__(self, problem: PartitionProblem) -> None:
        self.types, objective = Types.among(problem.all_shapes), problem.objective
        shapes = self.types.shapes
        self.inside = np.full((problem.num_layers, len(shapes), len(shapes)), np.inf)
        self.across = np.full(self.inside.shape, np.inf)
        most = {
            kind: max(g.devices_per_host for g in problem.cluster.groups if g.kind == kind)
            for kind in problem.cluster.kinds
        }
        for i, source in enumerate(shapes):
            for j, target in enumerate(shapes):
                alone = source.num_hosts == target.num_hosts == 1 and source.kind == target.kind
                together = alone and source.num_devices + target.num_devices <= most[source.kind]
                for layer in range(1, problem.num_layers):
                    self.across[layer, i, j] = problem.transfer_s(layer, source, target, False)
                    if together:
                        self.inside[layer, i, j] = problem.transfer_s(layer, source, target, True)
        self._once, self._repeated = objective.transfer_once, objective.transfer_repeated
        self._steps = np.sort(np.concatenate([self.inside, self.across], axis=2), axis=2)

    def hops(self, repeated: np.ndarray, limit: float) -> tuple[Hops, np.ndarray]:
        """The allowed transfers under a limit.

        Args:
            repeated: the term of each run without its transfer; float[layers, layers, shapes].

        Returns:
            The hops, and the runs that exceed the limit even with the fastest transfer: bool, shaped as `repeated`.
        """
        # A factor of 0 leaves impossible transfers impossible.
        inside, across = (
            np.multiply(self._once, t, out=np.full(t.shape, np.inf), where=np.isfinite(t))[:, None]
            for t in (self.inside, self.across)
        )
        level = np.zeros(repeated.shape, int)
        if self._repeated == 0 or np.isinf(limit):
            return Hops(inside, across, level), repeated > limit
        num_layers = len(repeated)
        allowed = self._num_allowed(limit - repeated)
        above = (repeated > limit) | (allowed == 0)
        # A level is a number of allowed transfers: the fastest ones before a layer, by type.
        used = [np.unique(allowed[:, layer - 1][~above[:, layer - 1]]) for layer in range(1, num_layers)]
        shape = (num_layers, max([len(counts) for counts in used], default=0) or 1, len(self.types.shapes))
        most = np.full(shape, np.inf)
        for layer, counts in enumerate(used, start=1):
            if len(counts):
                level[:, layer - 1] = np.minimum(np.searchsorted(counts, allowed[:, layer - 1]), len(counts) - 1)
            for number, count in enumerate(counts.tolist()):
                if count < self._all_transfers:
                    most[layer, number] = self._steps[layer, :, count - 1]
        inside, across = (
            np.where(seconds[:, None] <= most[..., None], costs, np.inf)
            for seconds, costs in ((self.inside, inside), (self.across, across))
        )
        return Hops(inside, across, level), above

    @property
    def _all_transfers(self) -> int:
        """A number that allows all transfers of any shape."""
        return self._steps.shape[2] + 1

    def _num_allowed(self, slack: np.ndarray) -> np.ndarray:
        """For each run, the number of transfers that its slack allows."""
        steps = (self._repeated * self._steps[1:])[:, self.types.of]
        finite = np.isfinite(steps)
        before = slack[:, :-1]  # by the last layer, so of the transfer before the next
        allowed = np.full(slack.shape, self._all_transfers)
        allowed[:, :-1] = np.where(before < steps[..., 0], 0, self._all_transfers)
        between = (before >= steps[..., 0]) & (before < np.where(finite, steps, -np.inf).max(axis=2))
        for layer, shape in np.argwhere(between.any(axis=0)).tolist():
            runs = between[:, layer, shape]
            count = np.searchsorted(steps[layer, shape], before[runs, layer, shape], side="right")
            allowed[runs, layer, shape] = count
        return allowed
