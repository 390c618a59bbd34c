"""Solve by dynamic programming along the order of the nodes, for comparison: exact if the graph is a chain.

In: a `Problem`. For each node in order, each strategy keeps its cheapest path from the strategies of the node before.
An edge from an earlier node is priced by the strategy on that path. OptCNN (Jia et al., "Exploring hidden dimensions in
parallelizing convolutional neural networks", 2018) and Tofu (Wang et al., "Supporting very large models using automatic
dataflow graph partitioning", 2019) first reduce graphs to chains and then do this. Memory is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.solve.problem import Problem, Solution, Status


@dataclass(frozen=True, slots=True)
class DynamicProgram:
    """A `Solver` without a proof."""

    def solve(self, problem: Problem) -> Solution:
        """The assignment that it finds; none if that is forbidden or needs too much memory."""
        num_nodes = len(problem.node_costs)
        if not all(len(costs) for costs in problem.node_costs):
            return Solution((), math.inf, -math.inf, Status.NOT_FOUND)
        back, until = _edges_back(problem), list(range(num_nodes))
        for node, edges in enumerate(back):
            for other, _ in edges:
                until[other] = max(until[other], node)
        ways: dict[int, np.ndarray] = {}  # node that later nodes read -> its strategy on each path
        steps: list[np.ndarray] = []
        costs = np.zeros(1)
        for node, own in enumerate(problem.node_costs):
            total = np.repeat(costs[:, None], len(own), axis=1)
            for other, matrix in back[node]:
                total += matrix[ways[other]]
            picks = total.argmin(axis=0)
            costs = total[picks, np.arange(len(own))] + own
            steps.append(picks)
            ways = {n: chosen[picks] for n, chosen in ways.items() if until[n] > node}
            if until[node] > node:
                ways[node] = np.arange(len(own))
        choices = [0] * num_nodes
        at = int(costs.argmin()) if num_nodes else 0
        for node in reversed(range(num_nodes)):
            choices[node] = at
            at = int(steps[node][at])
        found = tuple(choices)
        cost = problem.evaluate(found)
        if not math.isfinite(cost) or not problem.fits(found):
            return Solution((), math.inf, -math.inf, Status.NOT_FOUND)
        return Solution(found, cost, -math.inf, Status.UNPROVEN)


def _edges_back(problem: Problem) -> list[list[tuple[int, np.ndarray]]]:
    """For each node, the edges to earlier nodes, with the other node's strategies as rows."""
    back: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.node_costs]
    for edge in problem.edges:
        if edge.source < edge.target:
            back[edge.target].append((edge.source, edge.costs))
        else:
            back[edge.source].append((edge.target, edge.costs.T))
    return back
