"""Compute the cost of each decision and each flow.

In: `Decisions`, a hardware profile. Out: seconds per strategy, and the edges of the solver's problem.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from autopar.cost.collectives import collective_time
from autopar.cost.context_method import context_of
from autopar.cost.halo import extension_time
from autopar.cost.matmul_rows import Matmul, has_unaligned_dim, lost_by_moving, lost_rows, matmuls_of, summed
from autopar.cost.resharding_matrix import ReshardingTimes
from autopar.cost.resharding_paths import num_scattered
from autopar.cost.roofline import Load, compute_time, load_of
from autopar.formulate.decisions import Decision, Decisions, Flow
from autopar.formulate.group_communication import Sent, sends_itself, sent_by
from autopar.formulate.sharding_lists import ShardingLists, Shardings
from autopar.hardware.profile import HardwareProfile
from autopar.ir.explicit_program import Extend, HaloSlice
from autopar.ir.graph import Graph
from autopar.rules.grouping import SMALL_SIZE
from autopar.rules.strategies import Strategy
from autopar.rules.table import traits_of
from autopar.solve.problem import Edge

#: The price of memory that a loop holds, as a share of the time to read it once. Gathering a stack once, before the loop
#: or after the update, and gathering a slice in each iteration often send equal bytes; then the smaller one is better.
_LOOP_MEMORY_SHARE = 1.0


class Prices:
    """The costs of a step's decisions. Equal groups share their times, and equal flows share one matrix."""

    def __init__(
        self, decided: Decisions, lists: ShardingLists, profile: HardwareProfile, resharding: ReshardingTimes
    ) -> None:
        self._decided, self._lists, self._profile, self._resharding = decided, lists, profile, resharding
        self._graph, self._mesh = decided.graph, lists.mesh
        self._renewed = {before for before, _ in decided.graph.carried}
        self._matrices: dict[tuple[object, ...], np.ndarray] = {}
        self._times: dict[tuple[Load, int], np.ndarray] = {}
        self._collectives: dict[tuple[object, ...], float] = {}
        self._lost: dict[tuple[object, ...], np.ndarray] = {}

    def compute_s(self) -> tuple[np.ndarray, ...]:
        """Seconds of each decision's kernels under each strategy."""
        return tuple(map(self._compute_s, self._decided.decisions))

    def costs(self, compute_s: Sequence[np.ndarray], *, with_loop_memory: bool) -> tuple[np.ndarray, ...]:
        """`compute_s` plus each group's own communication and internal resharding.

        Args:
            with_loop_memory: whether to add a price for the memory that loops hold.
        """
        costs = [seconds.copy() for seconds in compute_s]
        for flow in self._decided.flows:
            if flow.source == flow.target:
                costs[flow.source] += self._matrix(flow).diagonal()
        self._add_sent(costs)
        if with_loop_memory:
            self._add_loop_memory(costs)
        return tuple(costs)

    def edges(self) -> tuple[Edge, ...]:
        """The flows between decisions with non-zero cost, as edges."""
        between = (flow for flow in self._decided.flows if flow.source != flow.target)
        edges = (Edge(flow.source, flow.target, self._matrix(flow)) for flow in between)
        return tuple(edge for edge in edges if edge.costs.any())

    def _compute_s(self, decision: Decision) -> np.ndarray:
        if decision.kind == "input" and decision.position not in self._renewed:
            info = self._graph.values[decision.value]  # data is written to memory as it arrives
            sizes = [s.local_size(info.shape, self._mesh) for s in decision.shardings]
            return np.array(sizes) * info.itemsize / self._profile.memory_bytes_per_s
        if decision.kind != "group":
            return np.zeros(decision.num_strategies)
        group = self._decided.groups[decision.group]
        load = load_of(group, self._decided.written, self._graph)
        key = (load, id(decision.strategies))
        if key not in self._times:
            self._times[key] = compute_time(load, decision.strategies, self._mesh, self._profile)
        matmuls = matmuls_of(self._graph, group) if self._profile.platform == "gpu" else ()
        return self._times[key] + self._lost_by_splitting(matmuls, decision.strategies) if matmuls else self._times[key]

    def _lost_by_splitting(self, matmuls: tuple[Matmul, ...], strategies: Sequence[Strategy]) -> np.ndarray:
        """Seconds that matmuls lose under each strategy by rows that are not aligned."""
        key = (matmuls, id(strategies))
        if key not in self._lost:
            of = self._mesh, self._profile
            self._lost[key] = np.array([sum(one.lost_s(strategy, *of) for one in matmuls) for strategy in strategies])
        return self._lost[key]

    # -- groups' own communication -------------------------------------------------------------

    def _add_sent(self, costs: Sequence[np.ndarray]) -> None:
        """Add the groups' own communication to `costs`.

        Nodes that read the same halo, such as a convolution and its kernel gradient, share its cost equally, as if they
        had the same sharding.
        """
        sent: list[tuple[int, int, Sent]] = []
        users: dict[HaloSlice, set[int]] = defaultdict(set)
        for node, group, strategies in self._decided.of_groups():
            if not sends_itself(group, self._graph):
                continue
            for s, strategy in enumerate(strategies):
                context = context_of(group, strategy, self._graph, self._mesh, self._profile)
                if context is not None:
                    costs[node][s] += self._graph.nodes[context.node].repeat * context.added_s
                for op in sent_by(group, strategy, self._graph, self._mesh):
                    sent.append((node, s, op))
                    for halo_slice in op.slices if isinstance(op, Extend) else ():
                        users[halo_slice].add(node)
        for node, s, op in sent:
            halo_slices = op.slices if isinstance(op, Extend) else ()
            sharers = max((len(users[halo_slice]) for halo_slice in halo_slices), default=1)
            costs[node][s] += op.num_times * self._seconds(op) / sharers

    def _add_loop_memory(self, costs: Sequence[np.ndarray]) -> None:
        """Add a price for the arrays that stay in memory while a loop runs: its stacks, where they are produced and as the
        loop reads them, and its constants.

        An input that the step does not update, such as the corpus of a search, is in memory anyway.
        """
        graph, seconds_per_byte = self._graph, _LOOP_MEMORY_SHARE / self._profile.memory_bytes_per_s
        kept = {value for position, value in enumerate(graph.inputs) if position not in self._renewed}
        priced = set[int]()

        def add(node: int, value: int, shardings: Shardings) -> None:
            info = graph.values[value]
            if info.size > SMALL_SIZE:
                sizes = np.array([one.local_size(info.shape, self._mesh) for one in shardings])
                costs[node][:] += seconds_per_byte * info.itemsize * sizes

        for node, group, strategies in self._decided.of_groups():
            for read in group.reads:
                if read.value in kept:
                    continue
                if any(traits_of(graph.nodes[n].primitive).held for n, _ in read.uses):
                    add(node, read.value, self._lists.shardings(strategies, read.dims, read.pending))
                    priced.add(read.value)
        priced.update(graph.nodes[n].results[0] for loop in graph.loops for n in loop.stacks)
        for value in sorted(priced & self._decided.made.keys()):
            node, shardings = self._decided.made[value]
            add(node, value, shardings)

    def _seconds(self, op: Sent) -> float:
        if isinstance(op, Extend):
            return extension_time(op, self._mesh, self._profile)
        key = (op.kind, op.axes, op.num_bytes, op.combinable)
        if key not in self._collectives:
            self._collectives[key] = collective_time(
                op.kind, op.num_bytes, op.axes, self._mesh, self._profile, combinable=op.combinable
            )
        return self._collectives[key]

    # -- flows between decisions ---------------------------------------------------------------

    def _matrix(self, flow: Flow) -> np.ndarray:
        info = self._graph.values[flow.value]
        shared = self._decided.decisions[flow.target].shared
        at_once = is_summed_at_once(self._graph, flow.value)
        how = (flow.combinable, flow.hideable, flow.update, flow.exact, shared, at_once)
        key = (info.shape, info.itemsize, info.repeat, id(flow.made), id(flow.wanted), *how)
        if key not in self._matrices:
            (made, rows), (wanted, columns) = self._lists.distinct(flow.made), self._lists.distinct(flow.wanted)
            seconds = np.empty((len(made), len(wanted)))
            for kept in {w.unreduced for w in wanted}:
                columns_kept = [i for i, w in enumerate(wanted) if w.unreduced == kept]
                left, right = tuple(m.without(kept) for m in made), tuple(wanted[i].resolved() for i in columns_kept)
                seconds[:, columns_kept] = self._seconds_between(flow, left, right)
                for row, m in enumerate(left if at_once else ()):
                    whole = [i for i, w in zip(columns_kept, right, strict=True) if num_scattered(m, w) > 1]
                    seconds[row, whole] = self._seconds_between(flow, (m,), (m.resolved(),))[0, 0]
            matrix = info.repeat * seconds[rows[:, None], columns]
            if shared or flow.exact:
                same = np.array([[m == w for w in wanted] for m in made])[rows[:, None], columns]
                matrix[same != np.array(shared or True)] = np.inf
            self._matrices[key] = matrix
        return self._with_lost_rows(flow, self._matrices[key])

    def _seconds_between(self, flow: Flow, made: Shardings, wanted: Shardings) -> np.ndarray:
        """Seconds to reshard a flow's value from each of `made` to each of `wanted`, in one iteration of its loops."""
        info = self._graph.values[flow.value]
        how = {"combinable": flow.combinable, "hideable": flow.hideable, "update": flow.update}
        return self._resharding.matrix(made, wanted, info.shape, info.itemsize, **how)

    def _with_lost_rows(self, flow: Flow, seconds: np.ndarray) -> np.ndarray:
        """Add what matmuls lose where a flow's collectives change the order of a matrix in memory."""
        info, copied = self._graph.values[flow.value], self._decided.decisions[flow.target].kind == "copy"
        if self._profile.platform != "gpu" or not has_unaligned_dim(info.shape, info.dtype):
            return seconds
        uses = tuple(self._graph.users.get(flow.value, ())) if copied else flow.uses
        dims, of = range(len(info.shape)), (self._graph, flow.value)
        gathered = [info.repeat * lost_by_moving(*of, d, uses, self._mesh, self._profile) for d in dims]
        producer = self._graph.producers.get(flow.value)
        result = () if producer is None else ((producer, 2),)
        scattered = [info.repeat * lost_by_moving(*of, d, result, self._mesh, self._profile) for d in dims]
        terms = summed(*of, self._mesh, self._profile)
        if not any(gathered) and not any(scattered) and not any(terms.lost_s):
            return seconds
        key = (tuple(gathered), tuple(scattered), terms, id(flow.made), id(flow.wanted))
        if key not in self._lost:
            (made, rows), (wanted, columns) = self._lists.distinct(flow.made), self._lists.distinct(flow.wanted)
            of_terms = [terms.by_dim(self._mesh.sizes(m.unreduced)) for m in made]
            lost = [
                [lost_rows(m, w, gathered, scattered, of_term) for w in wanted]
                for m, of_term in zip(made, of_terms, strict=True)
            ]
            self._lost[key] = np.array(lost)[rows[:, None], columns]
        return seconds + self._lost[key]


def is_summed_at_once(graph: Graph, value: int) -> bool:
    """Whether XLA sums a value over all its unreduced axes before it splits any dim. It does for the result of a scatter: its
    partitioner makes an all-reduce for each axis, and these become one, which no reduce-scatter over one dim can replace."""
    producer = graph.producers.get(value)
    return producer is not None and traits_of(graph.nodes[producer].primitive).in_place == "scatter"
