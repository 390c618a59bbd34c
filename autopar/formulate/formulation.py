"""From groups to numbers and back: which decision is which node of the solver's problem.

In: graph, groups, mesh, hardware profile, pins, memory budget. Out: `Formulation`: a `Problem`, and
for each of its nodes what choosing strategy *s* means for every tensor it makes or reads.

There are four kinds of decision: a group, an input (an input of carried state is one decision with the
output that renews it, so a training loop never reshards), an output, and a shared copy. A value that
several decisions read passes through a shared copy, so that gathering it once is paid once.

Most of a program is layer after layer of the same: equal groups share their strategies, their tensors' shardings and
their times, and equal flows one matrix. So building takes the time of what is distinct, and the solver sees which
matrices are one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from autopar.cost.collectives import collective_time
from autopar.cost.halo import Extension, Strip, extension_time, extensions_of
from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.resharding_matrix import Hideable, ReshardingTimes
from autopar.cost.resharding_paths import Move, resharding_moves
from autopar.cost.roofline import Load, compute_time, load_of
from autopar.ir.device_program import Stored
from autopar.ir.graph import Graph, Phase, Value
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.factors import DimFactors, Factor
from autopar.rules.grouping import SMALL_SIZE, Group
from autopar.rules.manual_regions import gather_of
from autopar.rules.strategies import Strategy, enumerate_strategies
from autopar.solve.problem import Edge, Problem, Usage

Shardings = tuple[TensorSharding, ...]  # one per strategy of a decision

#: Nodes by which a loop is given what it holds while it runs.
_HELD_BY_LOOPS = frozenset(["enter_slice", "enter_const"])


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
        shared: for a copy, per strategy whether it is its producer's own buffer (no new memory).
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
    last_use: dict[int, int] = field(repr=False)
    compute_s: tuple[np.ndarray, ...] = field(repr=False)
    input_decision: dict[int, int] = field(repr=False)  # input position -> decision
    value_made: dict[int, tuple[int, Shardings]] = field(repr=False)  # value -> its maker

    def moves(self, value: int, made: TensorSharding, wanted: TensorSharding) -> tuple[Move, ...]:
        """What resharding a value takes. A sum wanted unreduced stays pending as far as it is."""
        info = self.graph.values[value]
        made, wanted = made.without(wanted.unreduced), wanted.resolved()
        return resharding_moves(made, wanted, info.shape, info.itemsize, self.mesh)

    def extensions(self, decision: int, chosen: int) -> tuple[Extension, ...]:
        """What a group's operands are extended by under one of its strategies."""
        one = self.decisions[decision]
        if one.kind != "group":
            return ()
        return extensions_of(self.groups[one.group], one.strategies[chosen], self.graph, self.mesh)

    def time(self, kind: str, axes: tuple[str, ...], num_bytes: float, *, combinable: bool) -> float:
        """Predicted seconds of one collective."""
        return collective_time(kind, num_bytes, axes, self.mesh, self.profile, combinable=combinable)

    def with_memory_priced(self, seconds_per_byte: float) -> Problem:
        """The problem, where it costs something to hold arguments."""
        costs = [c.copy() for c in self.problem.node_costs]
        for one in _held_arguments(self.graph, self.value_made, self.mesh):
            costs[one.node] += seconds_per_byte * one.amounts()
        return replace(self.problem, node_costs=tuple(costs))


def formulate(
    graph: Graph,
    groups: tuple[Group, ...],
    mesh: MeshShape,
    profile: HardwareProfile,
    *,
    pins: Mapping[int, TensorSharding],
    memory_budget_bytes: float | None,
    stored: Sequence[Stored] = (),
    resharding: ReshardingTimes | None = None,
    held: Mapping[int, TensorSharding] | None = None,
) -> Formulation:
    """Build the problem.

    Args:
        pins: input position -> the sharding it must have.
        held: value that a node makes -> the sharding it must be made in, one of those it can be.
        stored: with a budget, the values that are in memory, and when; sharded otherwise, they hold as much more
            or less.
        resharding: times of this mesh and profile, by who builds several problems there.
    """
    times = resharding or ReshardingTimes(mesh, profile)
    builder = _Builder(graph, groups, mesh, profile, dict(pins), memory_budget_bytes, tuple(stored), times)
    return builder.build(held or {})


class _Builder:
    """Collects decisions and flows; the one mutable object of this module."""

    def __init__(
        self,
        graph: Graph,
        groups: tuple[Group, ...],
        mesh: MeshShape,
        profile: HardwareProfile,
        pins: dict[int, TensorSharding],
        budget: float | None,
        stored: tuple[Stored, ...],
        resharding: ReshardingTimes,
    ) -> None:
        self.graph, self.groups, self.mesh, self.profile = graph, groups, mesh, profile
        self.pins, self.budget, self.stored = pins, budget, stored
        self.decisions: list[Decision] = []
        self.flows: list[Flow] = []
        self.made: dict[int, tuple[int, Shardings]] = {}
        self.readers: dict[int, list[tuple[int, Shardings, tuple[tuple[int, int], ...]]]] = defaultdict(list)
        self.input_decision: dict[int, int] = {}
        self.position_of = {value: position for position, value in enumerate(graph.inputs)}
        self.renewed = dict(graph.carried)
        self.laid = _Laid(mesh)
        self.resharding = resharding
        self.matrices: dict[tuple[object, ...], np.ndarray] = {}
        self.times: dict[tuple[Load, int], np.ndarray] = {}
        self.last_use = _last_uses(graph)
        self.of_state: dict[int, bool] = {}

    def build(self, held: Mapping[int, TensorSharding]) -> Formulation:
        for index, group in enumerate(self.groups):
            self._add_group(index, group)
        self._add_inputs()
        self._add_outputs()
        written = frozenset(self.readers) & frozenset(self.made)
        for value in sorted(self.readers):
            if value in self.made:
                self._connect(value)
        compute = tuple(self._compute_time(d, written) for d in self.decisions)
        costs, edges = self._price([c.copy() for c in compute])
        for value, sharding in held.items():
            decision, shardings = self.made[value]
            costs[decision][[one != sharding for one in shardings]] = np.inf
        usages = self._usages() if self.budget is not None else ()
        return Formulation(
            graph=self.graph,
            groups=self.groups,
            mesh=self.mesh,
            profile=self.profile,
            decisions=tuple(self.decisions),
            flows=tuple(self.flows),
            written=written,
            problem=Problem(costs, edges, usages, self.budget),
            last_use=self.last_use,
            compute_s=compute,
            input_decision=self.input_decision,
            value_made=self.made,
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
        if self.budget is None or self.graph.values[value].size <= SMALL_SIZE:
            return False
        return any(self.graph.nodes[n].primitive in _HELD_BY_LOOPS for n, _ in uses)

    def _add_copy(
        self,
        value: int,
        source: int,
        made: Shardings,
        readers: Sequence[tuple[int, Shardings, tuple[tuple[int, int], ...]]],
    ) -> tuple[int, Shardings]:
        options = self.laid.any_of(made, [wanted for _, wanted, _ in readers])
        shared = (False,) * len(options)
        if self.budget is not None:  # "the producer's own buffer" and "a new one" differ in memory alone
            options, shared = self.laid.one((*options, *options)), ((True,) * len(options) + shared)
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
        if any(self.graph.nodes[n].primitive != "reshape" for n in group.nodes):
            return False
        readers = {reader for define in group.defines for reader, _, _ in self.readers[define.value]} - {node}
        return bool(readers) and all(map(self._is_update, readers))

    # -- numbers -----------------------------------------------------------------------------

    def _compute_time(self, decision: Decision, written: frozenset[int]) -> np.ndarray:
        if decision.kind == "input" and decision.position not in self.renewed:
            info = self.graph.values[decision.value]  # data is written to memory as it arrives
            sizes = [s.local_size(info.shape, self.mesh) for s in decision.shardings]
            return np.array(sizes) * info.itemsize / self.profile.hbm_bytes_per_s
        if decision.kind != "group":
            return np.zeros(decision.num_strategies)
        load = load_of(self.groups[decision.group], written, self.graph)
        key = (load, id(decision.strategies))
        if key not in self.times:
            self.times[key] = compute_time(load, decision.strategies, self.mesh, self.profile)
        return self.times[key]

    def _price(self, costs: list[np.ndarray]) -> tuple[tuple[np.ndarray, ...], tuple[Edge, ...]]:
        edges: list[Edge] = []
        for flow in self.flows:
            if flow.source == flow.target:
                costs[flow.source] += self._matrix(flow).diagonal()
                continue
            matrix = self._matrix(flow)
            if matrix.any():
                edges.append(Edge(flow.source, flow.target, matrix))
        self._price_small_sums(costs)
        self._price_halos(costs)
        self._price_gathers(costs)
        return tuple(costs), tuple(edges)

    def _price_small_sums(self, costs: list[np.ndarray]) -> None:
        """Reductions to a handful of elements (a loss, a norm) are summed where they are made."""
        for node, decision in enumerate(self.decisions):
            if decision.kind != "group":
                continue
            for define in self.groups[decision.group].defines:
                info = self.graph.values[define.value]
                if define.pending and info.size <= SMALL_SIZE:
                    shardings = self.laid.shardings(decision.strategies, define.dims, define.pending)
                    costs[node] += info.repeat * self._small_sum(info.num_bytes, shardings)

    def _small_sum(self, num_bytes: float, shardings: Shardings) -> np.ndarray:
        of_axes = {
            axes: collective_time("all-reduce", num_bytes, axes, self.mesh, self.profile, combinable=True)
            for axes in {s.unreduced for s in shardings if s.unreduced}
        }
        return np.array([of_axes.get(s.unreduced, 0.0) for s in shardings])

    def _price_halos(self, costs: list[np.ndarray]) -> None:
        """What neighbours send each other at the edges of their parts. Nodes that read the same share its price, as if
        all of them were split alike: a convolution and the gradient with respect to its kernel."""
        extensions = {
            (node, s): extensions_of(self.groups[decision.group], strategy, self.graph, self.mesh)
            for node, decision in enumerate(self.decisions)
            if decision.kind == "group" and self.groups[decision.group].region is not None
            for s, strategy in enumerate(decision.strategies)
        }
        readers: dict[Strip, set[int]] = defaultdict(set)
        for (node, _), found in extensions.items():
            for one in found:
                for strip in one.strips:
                    readers[strip].add(node)
        for (node, s), found in extensions.items():
            for one in found:
                sharers = max((len(readers[strip]) for strip in one.strips), default=1)
                repeat = self.graph.nodes[one.node].repeat
                costs[node][s] += repeat * extension_time(one, self.mesh, self.profile) / sharers

    def _price_gathers(self, costs: list[np.ndarray]) -> None:
        """What a node that runs as a manual region sends by itself."""
        for node, decision in enumerate(self.decisions):
            if decision.kind == "group" and self.groups[decision.group].region is not None:
                for s, strategy in enumerate(decision.strategies):
                    sent = gather_of(self.groups[decision.group], strategy, self.graph, self.mesh)
                    if sent is not None:
                        seconds = collective_time("all-gather", sent.num_bytes, sent.axes, self.mesh, self.profile)
                        costs[node][s] += self.graph.nodes[sent.node].repeat * seconds

    def _matrix(self, flow: Flow) -> np.ndarray:
        info = self.graph.values[flow.value]
        shared = self.decisions[flow.target].shared if self.budget is not None else ()
        how = (flow.combinable, flow.hideable, flow.exact, shared)
        key = (info.shape, info.itemsize, info.repeat, id(flow.made), id(flow.wanted), *how)
        if key not in self.matrices:
            (made, rows), (wanted, columns) = self.laid.distinct(flow.made), self.laid.distinct(flow.wanted)
            seconds = np.empty((len(made), len(wanted)))
            for kept in {w.unreduced for w in wanted}:
                columns_kept = [i for i, w in enumerate(wanted) if w.unreduced == kept]
                seconds[:, columns_kept] = self.resharding.matrix(
                    tuple(m.without(kept) for m in made),
                    tuple(wanted[i].resolved() for i in columns_kept),
                    info.shape,
                    info.itemsize,
                    combinable=flow.combinable,
                    hideable=flow.hideable,
                )
            matrix = info.repeat * seconds[rows[:, None], columns]
            if shared or flow.exact:
                same = np.array([[m == w for w in wanted] for m in made])[rows[:, None], columns]
                matrix[same != np.array(shared or True)] = np.inf
            self.matrices[key] = matrix
        return self.matrices[key]

    def _usages(self) -> tuple[Usage, ...]:
        amounts: dict[tuple[object, ...], np.ndarray] = {}
        usages: list[Usage] = []
        for held in self._held():
            key = (held.info.shape, held.info.itemsize, id(held.shardings), held.shared)
            if key not in amounts:
                amounts[key] = held.amounts()
            usages.append(Usage(held.node, held.start, held.end, amounts[key]))
        return tuple(usages)

    def _held(self) -> list[HeldTensor]:
        """Arguments are held throughout; what is stored, in its time; a shared copy from its first reader to its
        last."""
        end = len(self.graph.nodes) + 1
        held = _held_arguments(self.graph, self.made, self.mesh) + self._held_stored()
        first_use: dict[int, int] = {}
        for flow in self.flows:
            for n, _ in flow.uses:
                first_use[flow.source] = min(first_use.get(flow.source, end), n)
        for node, decision in enumerate(self.decisions):
            if decision.kind == "copy":
                info = self.graph.values[decision.value]
                start, stop = first_use.get(node, end - 1), self.last_use[decision.value] + 1
                if start < stop:
                    held.append(
                        HeldTensor(node, start, stop, info, decision.shardings, self.mesh, shared=decision.shared)
                    )
        return held

    def _held_stored(self) -> list[HeldTensor]:
        """Values in memory, sized by whoever makes them."""
        makers = {
            define.value: (node, define)
            for node, decision in enumerate(self.decisions)
            if decision.kind == "group"
            for define in self.groups[decision.group].defines
        }
        held: list[HeldTensor] = []
        for one in self.stored:
            if one.value not in makers or self.graph.values[one.value].size <= SMALL_SIZE:
                continue
            node, define = makers[one.value]
            shardings = self.laid.shardings(self.decisions[node].strategies, define.dims, define.pending)
            info = self.graph.values[one.value]
            held.append(HeldTensor(node, one.start, one.end, info, shardings, self.mesh))
        return held


class _Laid:
    """Strategies and shardings on one mesh. Equal ones are one object, so that what follows from them may be kept by
    their `id`: they live as long as this does."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        self._strategies: dict[tuple[object, ...], tuple[Strategy, ...]] = {}
        self._shardings: dict[tuple[object, ...], Shardings] = {}
        self._known: dict[Shardings, Shardings] = {}
        self._distinct: dict[int, tuple[Shardings, np.ndarray]] = {}

    def strategies(self, group: Group) -> tuple[Strategy, ...]:
        """All strategies of a group."""
        manual = group.region.manual if group.region else frozenset()
        windows = group.windows()
        windowed = tuple((factor, tuple(found)) for factor, found in windows.items())
        key = (group.factors, group.even, group.fixed, manual, group.pinned, windowed)
        if key not in self._strategies:
            self._strategies[key] = enumerate_strategies(
                group.factors,
                self._mesh,
                even=group.even,
                fixed=group.fixed,
                manual=manual,
                windows=windows,
                pinned=group.pinned,
            )
        return self._strategies[key]

    def shardings(self, strategies: tuple[Strategy, ...], dims: DimFactors, pending: tuple[int, ...] = ()) -> Shardings:
        """How each of a group's strategies splits a tensor."""
        key = (id(strategies), dims, pending)
        if key not in self._shardings:
            self._shardings[key] = self.one(tuple(s.sharding(dims, pending) for s in strategies))
        return self._shardings[key]

    def even(self, shape: tuple[int, ...]) -> Shardings:
        """Every sharding that `jax.jit` takes for an input or output: dims must divide."""
        key = ("even", shape)
        if key not in self._shardings:
            factors = [Factor(size) for size in shape if size > 1]
            dims = iter(range(len(factors)))
            named = tuple((next(dims),) if size > 1 else () for size in shape)
            strategies = enumerate_strategies(factors, self._mesh, even=range(len(factors)))
            self._shardings[key] = self.one(tuple(s.sharding(named) for s in strategies))
        return self._shardings[key]

    def any_of(self, made: Shardings, wanted: Sequence[Shardings]) -> Shardings:
        """What a tensor may be turned into for its readers: as it is made, summed, or as one of them wants it."""
        key = (id(made), *map(id, wanted))
        if key not in self._shardings:
            options = dict.fromkeys([*(m.resolved() for m in made), *(w for ws in wanted for w in ws)])
            self._shardings[key] = self.one(tuple(options))
        return self._shardings[key]

    def one(self, shardings: Shardings) -> Shardings:
        """The one object that stands for equal lists of shardings."""
        return self._known.setdefault(shardings, shardings)

    def distinct(self, shardings: Shardings) -> tuple[Shardings, np.ndarray]:
        """The different ones of a list that `one` has given, and of each in the list, which of them it is."""
        if id(shardings) not in self._distinct:
            number: dict[TensorSharding, int] = {}
            labels = np.array([number.setdefault(s, len(number)) for s in shardings], int)
            self._distinct[id(shardings)] = (tuple(number), labels)
        return self._distinct[id(shardings)]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A buffer: the decision that sizes it, when it is live, its sharding per strategy, and whether it is then its
    maker's own buffer, which takes no new memory."""

    node: int
    start: int
    end: int
    info: Value
    shardings: Shardings
    mesh: MeshShape
    shared: tuple[bool, ...] = ()

    def amounts(self) -> np.ndarray:
        """`num_bytes` under each strategy."""
        return np.array([self.num_bytes(s) for s in range(len(self.shardings))])

    def num_bytes(self, strategy: int) -> float:
        """Bytes on one device under a strategy of its decision."""
        if self.shared and self.shared[strategy]:
            return 0.0
        return self.info.itemsize * self.shardings[strategy].local_size(self.info.shape, self.mesh)


def _held_arguments(graph: Graph, made: Mapping[int, tuple[int, Shardings]], mesh: MeshShape) -> list[HeldTensor]:
    end, arguments = len(graph.nodes) + 1, set(graph.inputs)
    return [
        HeldTensor(node, 0, end, graph.values[value], shardings, mesh)
        for value, (node, shardings) in made.items()
        if value in arguments
    ]


def _last_uses(graph: Graph) -> dict[int, int]:
    """By value, the last node that reads it, or the last one of the innermost loop that holds it."""
    ends = {n: loop.stop - 1 for loop in reversed(graph.loops) for n in range(loop.start, loop.stop)}
    last: dict[int, int] = {}
    for n, node in enumerate(graph.nodes):
        until = ends.get(n, n) if node.primitive in _HELD_BY_LOOPS else n
        for value in node.operands:
            if value is not None:
                last[value] = max(until, last.get(value, 0))
    for value in graph.outputs:
        if value is not None:
            last[value] = len(graph.nodes)
    return last
