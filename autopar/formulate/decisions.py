"""Collect the decisions of a step and the values that flow between them.

In: graph, groups, pins. Out: `Decisions`. There are four kinds of decision: a group, an input, an output, and a shared
copy. An input of carried state is one decision with the output that updates it, so that a training loop never reshards
it. A value that several decisions read passes through a shared copy, so that one all-gather is counted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.resharding_matrix import Hideable, InPlaceUpdate
from autopar.formulate.sharding_lists import ShardingLists, Shardings
from autopar.ir.graph import Graph, Phase
from autopar.ir.sharding import TensorSharding
from autopar.rules.grouping import SMALL_SIZE, Group
from autopar.rules.strategies import Strategy
from autopar.rules.table import traits_of


@dataclass(frozen=True, slots=True)
class Decision:
    """One node of the problem.

    Args:
        kind: kind of decision.
        num_strategies: number of choices.
        phase: phase in which it runs; for a copy, the phase of its first user.
        group: position of the group.
        value: value of an input, output or copy.
        position: position among the graph's inputs or outputs.
        strategies: strategies of a group.
        shardings: shardings of an input, output or copy, per strategy.
        shared: whether a copy is its producer's own buffer and takes no new memory, per strategy; empty without a
            memory budget.
    """

    kind: Literal["group", "input", "output", "copy"]
    num_strategies: int
    phase: Phase
    group: int = -1
    value: int = -1
    position: int = -1
    strategies: tuple[Strategy, ...] = ()
    shardings: Shardings = ()
    shared: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that flows from one decision to another, or within a group that reshards it.

    Args:
        value: the value.
        source, target: decisions at either end.
        made, wanted: its sharding at the source and at the target, per strategy.
        combinable: whether XLA merges its collectives with others.
        uses: (node, operand)s of the group that reads it.
        exact: whether resharding is ruled out.
        hideable: kind of communication if independent kernels can overlap with it.
        update: carried state that the target updates in place.
    """

    value: int
    source: int
    target: int
    made: Shardings
    wanted: Shardings
    combinable: bool
    uses: tuple[tuple[int, int], ...] = ()
    exact: bool = False
    hideable: Hideable | None = None
    update: InPlaceUpdate | None = None


@dataclass(frozen=True, slots=True)
class Decisions:
    """All decisions of a step, and the flows between them.

    Args:
        made: value -> the decision that produces it, and its sharding under each strategy.
        input_decision: input position -> decision.
        written: values that flow between decisions.
    """

    graph: Graph
    groups: Sequence[Group]
    decisions: tuple[Decision, ...]
    flows: tuple[Flow, ...]
    made: dict[int, tuple[int, Shardings]]
    input_decision: dict[int, int]
    written: frozenset[int]

    def of_groups(self) -> Iterator[tuple[int, Group, tuple[Strategy, ...]]]:
        """Yield the decision, the group and the strategies of each group."""
        for index, one in enumerate(self.decisions):
            if one.kind == "group":
                yield index, self.groups[one.group], one.strategies


def decisions_of(
    graph: Graph,
    groups: Sequence[Group],
    pins: Mapping[int, TensorSharding],
    lists: ShardingLists,
    *,
    with_memory: bool,
) -> Decisions:
    """Collect the decisions of a step.

    Args:
        pins: input position -> required sharding.
        with_memory: whether there is a memory budget.
    """
    return _Collector(graph, groups, pins, lists, with_memory).run()


class _Collector:
    """Collects decisions and flows; the one mutable object of this module."""

    def __init__(
        self,
        graph: Graph,
        groups: Sequence[Group],
        pins: Mapping[int, TensorSharding],
        lists: ShardingLists,
        with_memory: bool,
    ) -> None:
        self.graph, self.groups, self.pins, self.lists, self.with_memory = graph, groups, pins, lists, with_memory
        self.decisions: list[Decision] = []
        self.flows: list[Flow] = []
        self.made: dict[int, tuple[int, Shardings]] = {}
        self.users: dict[int, list[tuple[int, Shardings, tuple[tuple[int, int], ...]]]] = defaultdict(list)
        self.input_decision: dict[int, int] = {}
        self.position_of = {value: position for position, value in enumerate(graph.inputs)}
        self.renewed = dict(graph.carried)
        self.updated = {graph.outputs[after] for _, after in graph.carried}
        self.of_state: dict[int, bool] = {}

    def run(self) -> Decisions:
        for index, group in enumerate(self.groups):
            self._add_group(index, group)
        self._add_inputs()
        self._add_outputs()
        written = frozenset(self.users) & frozenset(self.made)
        for value in sorted(self.users):
            if value in self.made:
                self._connect(value)
        return Decisions(
            self.graph,
            self.groups,
            tuple(self.decisions),
            tuple(self.flows),
            self.made,
            self.input_decision,
            written,
        )

    # -- decisions ---------------------------------------------------------------------------

    def _add_group(self, index: int, group: Group) -> None:
        strategies = self.lists.strategies(group)
        node = len(self.decisions)
        phase = self.graph.nodes[group.nodes[-1]].phase
        self.decisions.append(Decision("group", len(strategies), phase, group=index, strategies=strategies))
        for value, dims in group.inputs:
            self.input_decision[self.position_of[value]] = node
            self.made[value] = (node, self.lists.shardings(strategies, dims))
        for define in group.defines:
            if self.graph.values[define.value].size > SMALL_SIZE or define.pending:
                self.made[define.value] = (node, self.lists.shardings(strategies, define.dims, define.pending))
        for read in group.reads:
            wanted = self.lists.shardings(strategies, read.dims, read.pending)
            self.users[read.value].append((node, wanted, read.uses))

    def _add_inputs(self) -> None:
        for position, value in enumerate(self.graph.inputs):
            info = self.graph.values[value]
            if position in self.input_decision or info.size <= SMALL_SIZE:
                continue
            pinned = position in self.pins
            shardings = self.lists.one((self.pins[position],)) if pinned else self.lists.even(info.shape)
            node = len(self.decisions)
            self.decisions.append(
                Decision("input", len(shardings), "forward", value=value, position=position, shardings=shardings)
            )
            self.input_decision[position] = node
            self.made[value] = (node, shardings)
            after = self.graph.outputs[self.renewed[position]] if position in self.renewed else None
            if after is not None and after != value:
                self.users[after].append((node, shardings, ()))

    def _add_outputs(self) -> None:
        tied = {out for position, out in self.graph.carried if position in self.input_decision}
        for position, value in enumerate(self.graph.outputs):
            if value is None or position in tied or self.graph.values[value].size <= SMALL_SIZE:
                continue
            shardings = self.lists.even(self.graph.values[value].shape)
            node = len(self.decisions)
            self.decisions.append(
                Decision("output", len(shardings), "update", value=value, position=position, shardings=shardings)
            )
            self.users[value].append((node, shardings, ()))

    # -- flows -------------------------------------------------------------------------------

    def _connect(self, value: int) -> None:
        """Connect the producer of a value to its users, through a shared copy if there are several."""
        source, made = self.made[value]
        inside = [r for r in self.users[value] if r[0] == source]
        outside = [r for r in self.users[value] if r[0] != source]
        for node, wanted, uses in inside:  # resharded within one group
            self.flows.append(Flow(value, source, node, made, wanted, self._combinable(source, node), uses))
        if not outside:
            return
        into_loops = {node for node, _, uses in outside if self._is_held_by_a_loop(value, uses)}
        if len({node for node, _, _ in outside}) > 1 or into_loops:
            source, made = self._add_copy(value, source, made, outside)
        for node, wanted, uses in outside:
            producer, exact = self.made[value][0], node in into_loops
            combinable, hideable = self._combinable(producer, node), self._hideable(producer, node)
            update = self._update(value, node) if hideable == "sum" else None
            self.flows.append(Flow(value, source, node, made, wanted, combinable, uses, exact, hideable, update))

    def _is_held_by_a_loop(self, value: int, uses: Sequence[tuple[int, int]]) -> bool:
        """Whether there is a memory budget and the value stays live throughout a loop.

        Such a value passes through a copy whose memory counts. Resharding within an iteration happens in the loop.
        """
        if not self.with_memory or self.graph.values[value].size <= SMALL_SIZE:
            return False
        return any(traits_of(self.graph.nodes[n].primitive).held for n, _ in uses)

    def _add_copy(
        self,
        value: int,
        source: int,
        made: Shardings,
        users: Sequence[tuple[int, Shardings, tuple[tuple[int, int], ...]]],
    ) -> tuple[int, Shardings]:
        options = self.lists.any_of(made, [wanted for _, wanted, _ in users])
        shared: tuple[bool, ...] = ()
        if self.with_memory:  # the producer's own buffer and a new buffer differ in memory only
            shared = (True,) * len(options) + (False,) * len(options)
            options = self.lists.one((*options, *options))
        node = len(self.decisions)
        first = min(users, key=lambda r: min((n for n, _ in r[2]), default=len(self.graph.nodes)))[0]
        self.decisions.append(
            Decision(
                "copy",
                len(options),
                self.decisions[first].phase,
                value=value,
                shardings=options,
                shared=shared,
            )
        )
        combinable = all(self._combinable(source, user) for user, _, _ in users)
        kinds: set[Hideable | None] = {self._hideable(source, user) for user, _, _ in users}
        hideable = kinds.pop() if len(kinds) == 1 else None
        found = (self._update(value, user) for user, _, _ in users) if hideable == "sum" else ()
        update = next(filter(None, found), None)
        self.flows.append(Flow(value, source, node, made, options, combinable, hideable=hideable, update=update))
        return node, options

    def _combinable(self, source: int, target: int) -> bool:
        """Whether XLA merges the collectives of a flow: all-gathers of inputs, reductions into the update and all-gathers
        of its results are independent of one another."""
        return self._is_given(source) or self.decisions[target].kind in ("input", "output") or self._is_update(target)

    def _hideable(self, source: int, target: int) -> Hideable | None:
        """The kind of communication of a flow that kernels can hide, None if exposed.

        All-gathers of inputs and reductions of gradients overlap with computation. After the update no computation is
        left to overlap with.
        """
        if self._is_given(source):
            return "gather"
        return "sum" if self._is_update(target) else None

    def _update(self, value: int, node: int) -> InPlaceUpdate | None:
        """The carried state of the value's shape that a decision updates from it."""
        group = self.groups[self.decisions[node].group] if self.decisions[node].kind == "group" else None
        dims = next((read.dims for read in group.reads if read.value == value), None) if group else None
        if group is None or dims is None:
            return None
        updated = [one for one in group.defines if one.value in self.updated and sorted(one.dims) == sorted(dims)]
        if not updated:
            return None
        order = tuple(updated[0].dims.index(dim) for dim in dims)
        return InPlaceUpdate(tuple(self.graph.values[one.value].itemsize for one in updated), order)

    def _is_given(self, node: int) -> bool:
        """Whether a decision is an input, or computed from the carried state alone."""
        return self.decisions[node].kind == "input" or self._is_of_state(node)

    def _is_of_state(self, node: int) -> bool:
        """Whether a decision is an input of carried state, or only casts, transposes or scales one."""
        if node not in self.of_state:
            decision = self.decisions[node]
            self.of_state[node] = decision.kind == "input" and decision.position in self.renewed
            if decision.kind == "group":  # False until known, because a loop's value may depend on itself
                group = self.groups[decision.group]
                read = {read.value for read in group.reads}
                if len(read) + len(group.inputs) == 1:
                    carried = [self.position_of[value] in self.renewed for value, _ in group.inputs]
                    producers = [self.made[value][0] for value in read if value in self.made]
                    self.of_state[node] = any(carried) or any(map(self._is_of_state, producers))
        return self.of_state[node]

    def _is_update(self, node: int) -> bool:
        """Whether a decision belongs to the update, or only reshapes for it."""
        decision = self.decisions[node]
        if decision.kind != "group" or decision.phase == "update":
            return decision.phase == "update"
        group = self.groups[decision.group]
        if not all(traits_of(self.graph.nodes[n].primitive).reshapes for n in group.nodes):
            return False
        users = {user for define in group.defines for user, _, _ in self.users[define.value]} - {node}
        return bool(users) and all(map(self._is_update, users))
