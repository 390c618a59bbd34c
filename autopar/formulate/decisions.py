"""What is decided, and what passes between decisions.

In: graph, groups, pins. Out: `Decisions`. There are four kinds of decision: a group, an input (an input of carried state is one
decision with the output that renews it, so a training loop never reshards), an output, and a shared copy. A value that
several decisions read passes through a shared copy, so that gathering it once is paid once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.resharding_matrix import Hideable
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
        kind: what is decided.
        num_strategies: how many ways there are.
        group: position of the group, for a group.
        value: the value decided, for an input, output or copy.
        position: position among the graph's inputs or outputs.
        strategies: for a group.
        shardings: for an input, output or copy.
        shared: for a copy, where memory counts, per strategy whether it is its producer's own buffer (no new memory).
        phase: when it runs; for a copy, when the first reader does.
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
    """A value passing from one decision to another (or within one group, where it is read otherwise
    than it is made): its sharding on either side, per strategy."""

    value: int
    source: int
    target: int
    made: Shardings
    wanted: Shardings
    combinable: bool
    uses: tuple[tuple[int, int], ...] = ()  # (node, operand)s of a reading group
    exact: bool = False  # it passes only as it is
    hideable: Hideable | None = None  # kernels that do not need it can run meanwhile


@dataclass(frozen=True, slots=True)
class Decisions:
    """All decisions of a step, and the flows between them.

    Args:
        made: value -> the decision that makes it, and its sharding under each strategy.
        input_decision: input position -> decision.
        written: values that pass from one decision to another.
    """

    graph: Graph
    groups: Sequence[Group]
    decisions: tuple[Decision, ...]
    flows: tuple[Flow, ...]
    made: dict[int, tuple[int, Shardings]]
    input_decision: dict[int, int]
    written: frozenset[int]

    def of_groups(self) -> Iterator[tuple[int, Group, tuple[Strategy, ...]]]:
        """Of each group its decision, and its strategies."""
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
    """What is to be decided.

    Args:
        pins: input position -> the sharding it must have.
        with_memory: whether it matters how much is held.
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
        self.graph, self.groups, self.pins, self.laid, self.with_memory = graph, groups, pins, lists, with_memory
        self.decisions: list[Decision] = []
        self.flows: list[Flow] = []
        self.made: dict[int, tuple[int, Shardings]] = {}
        self.readers: dict[int, list[tuple[int, Shardings, tuple[tuple[int, int], ...]]]] = defaultdict(list)
        self.input_decision: dict[int, int] = {}
        self.position_of = {value: position for position, value in enumerate(graph.inputs)}
        self.renewed = dict(graph.carried)
        self.of_state: dict[int, bool] = {}

    def run(self) -> Decisions:
        for index, group in enumerate(self.groups):
            self._add_group(index, group)
        self._add_inputs()
        self._add_outputs()
        written = frozenset(self.readers) & frozenset(self.made)
        for value in sorted(self.readers):
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
        strategies = self.laid.strategies(group)
        node = len(self.decisions)
        phase = self.graph.nodes[group.nodes[-1]].phase
        self.decisions.append(Decision("group", len(strategies), phase, group=index, strategies=strategies))
        for value, dims in group.inputs:
            self.input_decision[self.position_of[value]] = node
            self.made[value] = (node, self.laid.shardings(strategies, dims))
        for define in group.defines:
            if self.graph.values[define.value].size > SMALL_SIZE or define.pending:
                self.made[define.value] = (node, self.laid.shardings(strategies, define.dims, define.pending))
        for read in group.reads:
            wanted = self.laid.shardings(strategies, read.dims, read.pending)
            self.readers[read.value].append((node, wanted, read.uses))

    def _add_inputs(self) -> None:
        for position, value in enumerate(self.graph.inputs):
            info = self.graph.values[value]
            if position in self.input_decision or info.size <= SMALL_SIZE:
                continue
            pinned = position in self.pins
            shardings = self.laid.one((self.pins[position],)) if pinned else self.laid.even(info.shape)
            node = len(self.decisions)
            self.decisions.append(
                Decision("input", len(shardings), "forward", value=value, position=position, shardings=shardings)
            )
            self.input_decision[position] = node
            self.made[value] = (node, shardings)
            after = self.graph.outputs[self.renewed[position]] if position in self.renewed else None
            if after is not None and after != value:
                self.readers[after].append((node, shardings, ()))

    def _add_outputs(self) -> None:
        tied = {out for position, out in self.graph.carried if position in self.input_decision}
        for position, value in enumerate(self.graph.outputs):
            if value is None or position in tied or self.graph.values[value].size <= SMALL_SIZE:
                continue
            shardings = self.laid.even(self.graph.values[value].shape)
            node = len(self.decisions)
            self.decisions.append(
                Decision("output", len(shardings), "update", value=value, position=position, shardings=shardings)
            )
            self.readers[value].append((node, shardings, ()))

    # -- flows -------------------------------------------------------------------------------

    def _connect(self, value: int) -> None:
        """Join the maker of a value with its readers, through a shared copy if there are several."""
        source, made = self.made[value]
        inside = [r for r in self.readers[value] if r[0] == source]
        outside = [r for r in self.readers[value] if r[0] != source]
        for node, wanted, uses in inside:  # read otherwise than made, within one group
            self.flows.append(Flow(value, source, node, made, wanted, self._combinable(source, node), uses))
        if not outside:
            return
        into_loops = {node for node, _, uses in outside if self._is_held_by_a_loop(value, uses)}
        if len({node for node, _, _ in outside}) > 1 or into_loops:
            source, made = self._add_copy(value, source, made, outside)
        for node, wanted, uses in outside:
            maker, exact = self.made[value][0], node in into_loops
            combinable, hideable = self._combinable(maker, node), self._hideable(maker, node)
            self.flows.append(Flow(value, source, node, made, wanted, combinable, uses, exact, hideable))

    def _is_held_by_a_loop(self, value: int, uses: Sequence[tuple[int, int]]) -> bool:
        """Whether memory matters, and a loop holds what it is given while it runs: so that is a copy, whose memory
        counts. What is read otherwise in a trip is gathered there."""
        if not self.with_memory or self.graph.values[value].size <= SMALL_SIZE:
            return False
        return any(traits_of(self.graph.nodes[n].primitive).held for n, _ in uses)

    def _add_copy(
        self,
        value: int,
        source: int,
        made: Shardings,
        readers: Sequence[tuple[int, Shardings, tuple[tuple[int, int], ...]]],
    ) -> tuple[int, Shardings]:
        options = self.laid.any_of(made, [wanted for _, wanted, _ in readers])
        shared: tuple[bool, ...] = ()
        if self.with_memory:  # "the producer's own buffer" and "a new one" differ in memory alone
            shared = (True,) * len(options) + (False,) * len(options)
            options = self.laid.one((*options, *options))
        node = len(self.decisions)
        first = min(readers, key=lambda r: min((n for n, _ in r[2]), default=len(self.graph.nodes)))[0]
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
        combinable = all(self._combinable(source, reader) for reader, _, _ in readers)
        kinds: set[Hideable | None] = {self._hideable(source, reader) for reader, _, _ in readers}
        hideable = kinds.pop() if len(kinds) == 1 else None
        self.flows.append(Flow(value, source, node, made, options, combinable, hideable=hideable))
        return node, options

    def _combinable(self, source: int, target: int) -> bool:
        """Gathers of inputs, reductions into the update and gathers of its results do not wait for
        one another, so XLA merges them."""
        return self._is_given(source) or self.decisions[target].kind in ("input", "output") or self._is_update(target)

    def _hideable(self, source: int, target: int) -> Hideable | None:
        """What the step is given can be gathered while others compute, and a gradient be summed while the next is made.
        For the results of the update nothing is left to do meanwhile."""
        if self._is_given(source):
            return "gather"
        return "sum" if self._is_update(target) else None

    def _is_given(self, node: int) -> bool:
        """Whether a decision is an input, or made of the state as soon as there is any."""
        return self.decisions[node].kind == "input" or self._is_of_state(node)

    def _is_of_state(self, node: int) -> bool:
        """Whether a decision is an input of carried state, or does nothing but cast, turn or scale one."""
        if node not in self.of_state:
            decision = self.decisions[node]
            self.of_state[node] = decision.kind == "input" and decision.position in self.renewed
            if decision.kind == "group":  # False until it is known: a loop's value may be made of itself
                group = self.groups[decision.group]
                read = {read.value for read in group.reads}
                if len(read) + len(group.inputs) == 1:
                    carried = [self.position_of[value] in self.renewed for value, _ in group.inputs]
                    makers = [self.made[value][0] for value in read if value in self.made]
                    self.of_state[node] = any(carried) or any(map(self._is_of_state, makers))
        return self.of_state[node]

    def _is_update(self, node: int) -> bool:
        """Whether a decision is of the update, or does nothing but reshape for it."""
        decision = self.decisions[node]
        if decision.kind != "group" or decision.phase == "update":
            return decision.phase == "update"
        group = self.groups[decision.group]
        if not all(traits_of(self.graph.nodes[n].primitive).reshapes for n in group.nodes):
            return False
        readers = {reader for define in group.defines for reader, _, _ in self.readers[define.value]} - {node}
        return bool(readers) and all(map(self._is_update, readers))
