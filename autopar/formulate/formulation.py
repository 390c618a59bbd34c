"""Formulate the solver's problem: one node per decision, one edge per flow.

In: graph, groups, mesh, hardware profile, pins, memory budget. Out: `Formulation`: a `Problem`, and for each of its
nodes the meaning of strategy *s* for every tensor that it produces or reads.

Most programs repeat identical layers. Equal groups share their strategies, shardings and times, and equal flows share
one matrix. Formulation therefore pays for distinct layers only, and the solver sees which matrices are identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost.collectives import cheaper_than_built_in, collective_time
from autopar.cost.resharding_matrix import ReshardingTimes
from autopar.cost.resharding_paths import Move, num_scattered, resharding_moves
from autopar.cost.user_collectives import registered
from autopar.formulate.decisions import Decision, Flow, decisions_of
from autopar.formulate.held_tensors import held_arguments, held_tensors, usages_of
from autopar.formulate.prices import Prices, is_summed_at_once
from autopar.formulate.sharding_lists import ShardingLists, Shardings
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import Stored
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.grouping import Group
from autopar.solve.problem import Problem


@dataclass(frozen=True, slots=True)
class Formulation:
    """The problem and its meaning."""

    graph: Graph
    groups: tuple[Group, ...]
    mesh: MeshShape
    profile: HardwareProfile
    decisions: tuple[Decision, ...]
    flows: tuple[Flow, ...]
    written: frozenset[int]
    problem: Problem
    compute_s: tuple[np.ndarray, ...] = field(repr=False)
    input_decision: dict[int, int] = field(repr=False)  # input position -> decision
    value_made: dict[int, tuple[int, Shardings]] = field(repr=False)  # value -> its producer

    def moves(self, value: int, made: TensorSharding, wanted: TensorSharding) -> tuple[Move, ...]:
        """The moves that reshard a value. Reductions pending in both `made` and `wanted` stay pending."""
        info = self.graph.values[value]
        made, wanted = made.without(wanted.unreduced), wanted.resolved()
        of = info.shape, info.itemsize, self.mesh
        if num_scattered(made, wanted) > 1 and is_summed_at_once(self.graph, value):
            whole = made.resolved()
            return (*resharding_moves(made, whole, *of), *resharding_moves(whole, wanted, *of))
        return resharding_moves(made, wanted, *of)

    def registered_for(self, value: int, move: Move, made: TensorSharding, *, combinable: bool) -> str:
        """The name of the registered collective for a move if it is faster than the built-in one, else empty."""
        shape, mesh = self.graph.values[value].shape, self.mesh
        if not registered() or not (made.divides(shape, mesh) and move.result.divides(shape, mesh)):
            return ""
        return cheaper_than_built_in(move.kind, move.num_bytes, move.axes, mesh, self.profile, combinable=combinable)

    def time(self, kind: str, axes: tuple[str, ...], num_bytes: float, *, combinable: bool) -> float:
        """Predicted seconds of one collective."""
        return collective_time(kind, num_bytes, axes, self.mesh, self.profile, combinable=combinable)

    def with_memory_priced(self, seconds_per_byte: float) -> Problem:
        """The problem with a price on the memory of the step's arguments."""
        costs = [c.copy() for c in self.problem.node_costs]
        for one in held_arguments(self.graph, self.value_made, self.mesh):
            costs[one.node] += seconds_per_byte * one.amounts()
        return replace(self.problem, node_costs=tuple(costs))


def formulate(
    graph: Graph,
    groups: tuple[Group, ...],
    mesh: MeshShape,
    profile: HardwareProfile,
    *,
    pins: Mapping[int, TensorSharding],
    memory_budget_bytes: float | None = None,
    stored: Sequence[Stored] = (),
    resharding: ReshardingTimes | None = None,
    held: Mapping[int, TensorSharding] | None = None,
) -> Formulation:
    """Build the problem.

    Args:
        pins: input position -> required sharding.
        memory_budget_bytes: memory limit per device; None for no limit.
        stored: values in memory and their live ranges, if there is a budget; their sizes depend on their shardings.
        resharding: cache of resharding times for this mesh and profile, to share between several problems.
        held: value that a node produces -> required sharding, one of those that the node's strategies give.
    """
    lists = ShardingLists(mesh)
    decided = decisions_of(graph, groups, pins, lists, with_memory=memory_budget_bytes is not None)
    prices = Prices(decided, lists, profile, resharding or ReshardingTimes(mesh, profile))
    compute_s = prices.compute_s()
    costs = prices.costs(compute_s, with_loop_memory=memory_budget_bytes is None)  # else the limit bounds it
    for value, sharding in (held or {}).items():
        decision, shardings = decided.made[value]
        costs[decision][[one != sharding for one in shardings]] = np.inf
    usages = () if memory_budget_bytes is None else usages_of(held_tensors(decided, stored, lists))
    return Formulation(
        graph=graph,
        groups=groups,
        mesh=mesh,
        profile=profile,
        decisions=decided.decisions,
        flows=decided.flows,
        written=decided.written,
        problem=Problem(costs, prices.edges(), usages, memory_budget_bytes),
        compute_s=compute_s,
        input_decision=decided.input_decision,
        value_made=decided.made,
    )
