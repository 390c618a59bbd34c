"""Group nodes that share one strategy, so that the problem stays small.

In: a graph and one `Rule` per node. Out: `Group`s. Each is a set of nodes over one common space of factors, with the
values that it reads from outside and the values that it defines.

Which nodes join, and why:

1. An elementwise node joins the producer of an operand that spans the whole space of both: different splits would only
   add resharding. A reduction (`reduce_sum` …) joins its operand's group.
2. Elementwise and reduction nodes that read the same value join each other.
3. The two pieces of a loop's carry join each other: each iteration leaves the carry as the next iteration reads it.
4. A small group joins a large one if a reduction of the large group feeds it and its result is broadcast back (the
   statistics of a layer norm or a softmax).

Shared carried state is no reason to join: the forward pass and the optimizer read the same parameter, and ZeRO splits
it differently for each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph
from autopar.rules.factors import ContextLoop, DimFactors, Exchange, Factor, Reduction, Rule
from autopar.rules.halo_window import Halo, Window
from autopar.rules.table import traits_of

#: Values of at most this many elements are no decisions of the problem: they are replicated, and XLA merges their
#: collectives with others.
SMALL_SIZE = 64


@dataclass(frozen=True, slots=True)
class Read:
    """A value that a group reads: its dims in the group's factors, and its uses as (node, operand). If a `pending`
    factor is split, the value may be unreduced."""

    value: int
    dims: DimFactors
    uses: tuple[tuple[int, int], ...]
    pending: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Define:
    """A value that a group defines. If a `pending` factor is split, the value is unreduced."""

    value: int
    node: int
    dims: DimFactors
    pending: tuple[int, ...]
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and intermediate memory traffic of one node.

    Args:
        factors: the factors of the node's iteration space.
        flops_per_point: operations per point of that space; on matrix units if the node is a `contraction` of this
            `dtype`.
        repeat: how often a step runs the node.
        stored: intermediate tensors that XLA writes and reads again, by the factors they span, with `itemsize` bytes
            per element.
        matrix_flops_per_point: further operations on matrix units, by dtype.
        matrix_efficiency: the share of a large matmul's rate that these reach.
    """

    factors: tuple[int, ...]
    flops_per_point: float
    contraction: bool
    dtype: str
    repeat: float = 1.0
    stored: tuple[tuple[int, ...], ...] = ()
    itemsize: float = 0.0
    matrix_flops_per_point: tuple[tuple[str, float], ...] = ()
    matrix_efficiency: float = 1.0

    @property
    def by_unit(self) -> tuple[float, tuple[tuple[str, float], ...]]:
        """Operations per point outside matrix units, and on matrix units by dtype."""
        if self.contraction:
            return 0.0, ((self.dtype, self.flops_per_point), *self.matrix_flops_per_point)
        return self.flops_per_point, self.matrix_flops_per_point


@dataclass(frozen=True, slots=True)
class Region:
    """How a node runs as a manual region, in the group's factors: the dims of all its tensors (literals too), its
    all-gathers and its halos.

    Args:
        manual: the node runs as a manual region if one of these factors is split.
        context: the loop over the tokens of an attention.
    """

    node: int
    manual: frozenset[int]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]
    exchanges: tuple[Exchange, ...]
    halos: tuple[Halo, ...]
    context: ContextLoop | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes over one factor space.

    Args:
        even: factors that may only be split evenly.
        fixed: factors that may not be split (minor parts of a compound dim).
        inputs: graph inputs (value indices) that belong to the group, because only the group reads and updates them,
            with their dims in the group's factors.
        pinned: factors that the program itself splits, with their mesh axes.
        region: the manual region of a node with manual factors; such a node is a group of its own.
    """

    nodes: tuple[int, ...]
    factors: tuple[Factor, ...]
    reads: tuple[Read, ...]
    defines: tuple[Define, ...]
    works: tuple[Work, ...]
    even: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    inputs: tuple[tuple[int, DimFactors], ...] = ()
    pinned: tuple[tuple[int, tuple[str, ...]], ...] = ()
    region: Region | None = None

    def windows(self) -> dict[int, list[Window]]:
        """By factor, the windows in which its loop reads operands."""
        windows: dict[int, list[Window]] = defaultdict(list)
        for halo in self.region.halos if self.region else ():
            windows[halo.factor].append(halo.window)
        return windows


def joins(rule: Rule, primitive: str) -> bool:
    """Whether a node may join others: it is elementwise, or a reduction, which joins its operand's group."""
    if rule.manual:
        return False
    return rule.pointwise or (traits_of(primitive).reduces == "dims" and len(rule.operands) >= 1 and bool(rule.factors))


def form_groups(graph: Graph, rules: Sequence[Rule], absorbable: frozenset[int] = frozenset()) -> tuple[Group, ...]:
    """Form the groups of a graph.

    Args:
        rules: one per node.
        absorbable: positions of inputs that may belong to a group (unpinned carried state).
    """
    joiner = _Joiner(graph, rules)
    joiner.join_carries()
    joiner.join_producers()
    joiner.join_siblings()
    joiner.join_sandwiched()
    renewals = _renewals(graph, absorbable)
    return tuple(_build(graph, rules, joiner, nodes, renewals) for nodes in joiner.members())


class _Joiner:
    """A union-find over nodes and over their factors; a join unifies the factors of two groups one to one."""

    def __init__(self, graph: Graph, rules: Sequence[Rule]) -> None:
        self.graph, self.rules = graph, rules
        self.offset = [0]
        for rule in rules:
            self.offset.append(self.offset[-1] + len(rule.factors))
        self.factor_parent = list(range(self.offset[-1]))
        self.node_parent = list(range(len(rules)))
        self.joinable = [joins(rule, node.primitive) for rule, node in zip(rules, graph.nodes, strict=True)]
        self.space: list[set[int]] = [set(range(a, b)) for a, b in zip(self.offset, self.offset[1:], strict=False)]
        self.defined: dict[int, tuple[int, int]] = {
            value: (n, i) for n, node in enumerate(graph.nodes) for i, value in enumerate(node.results)
        }
        self.readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for n, node in enumerate(graph.nodes):
            for i, value in enumerate(node.operands):
                if value is not None and graph.values[value].size > SMALL_SIZE:
                    self.readers[value].append((n, i))
        self.ends = {self._end(leave) for loop in graph.loops for _, leave in loop.sums}

    def _end(self, leave: int) -> int:
        """The node that ends a sum over a loop's iterations; its users may be split differently from its terms. If the
        sum is cast to fewer bytes, this is the cast, because the cast runs before the reduction over devices."""
        (value,), values = self.graph.nodes[leave].results, self.graph.values
        if len(self.readers[value]) == 1:
            reader = self.readers[value][0][0]
            node = self.graph.nodes[reader]
            if node.primitive == "convert_element_type" and values[node.results[0]].itemsize < values[value].itemsize:
                return reader
        return leave

    def factor(self, element: int) -> int:
        while self.factor_parent[element] != element:
            self.factor_parent[element] = self.factor_parent[self.factor_parent[element]]
            element = self.factor_parent[element]
        return element

    def node(self, node: int) -> int:
        while self.node_parent[node] != node:
            self.node_parent[node] = self.node_parent[self.node_parent[node]]
            node = self.node_parent[node]
        return node

    def dims(self, node: int, dims: DimFactors) -> tuple[tuple[int, ...], ...]:
        """A tensor's dims as factor classes."""
        first, factor = self.offset[node], self.factor
        return tuple([tuple([factor(first + f) for f in dim]) for dim in dims])

    def operand(self, node: int, index: int) -> tuple[tuple[int, ...], ...]:
        return self.dims(node, self.rules[node].operands[index])

    def result(self, node: int, index: int) -> tuple[tuple[int, ...], ...]:
        return self.dims(node, self.rules[node].results[index])

    def spans(self, node: int, dims: tuple[tuple[int, ...], ...]) -> bool:
        """Whether a tensor has every factor of the node's whole group."""
        return {f for dim in dims for f in dim} == self.space[self.node(node)]

    def join(self, a: int, b: int, a_dims: tuple[tuple[int, ...], ...], b_dims: tuple[tuple[int, ...], ...]) -> bool:
        """Unify two groups by the dims of a tensor that both have; False if their factors do not pair up."""
        pairs: list[tuple[int, int]] = []
        for dim_a, dim_b in zip(a_dims, b_dims, strict=True):
            if len(dim_a) != len(dim_b):
                return False
            pairs += zip(dim_a, dim_b, strict=True)
        root_a, root_b = self.node(a), self.node(b)
        if root_a == root_b:
            return False
        if len({x for x, _ in pairs}) != len(pairs) or len({y for _, y in pairs}) != len(pairs):
            return False
        for x, y in pairs:
            self.factor_parent[y] = x
        if len(self.space[root_a]) < len(self.space[root_b]):  # keep the larger group's space
            root_a, root_b = root_b, root_a
        self.node_parent[root_b] = root_a
        self.space[root_a] = {self.factor(f) for f in self.space[root_a] | self.space[root_b]}
        self.space[root_b] = set()
        return True

    def join_carries(self) -> None:
        for loop in self.graph.loops:
            for enter, leave in loop.carries:
                self.join(enter, leave, self.result(enter, 0), self.result(leave, 0))

    def join_producers(self) -> None:
        for value, uses in self.readers.items():
            if value not in self.defined:
                continue
            producer, index = self.defined[value]
            if not self.joinable[producer] or producer in self.ends:
                continue
            for reader, operand in uses:
                made, read = self.result(producer, index), self.operand(reader, operand)
                if self.joinable[reader] and self.spans(producer, made) and self.spans(reader, read):
                    self.join(producer, reader, made, read)

    def join_siblings(self) -> None:
        state = {self.graph.inputs[position] for position, _ in self.graph.carried}
        for value, uses in self.readers.items():
            if value in state:
                continue
            first: tuple[int, int] | None = None
            for reader, operand in uses:
                if not self.joinable[reader] or not self.spans(reader, self.operand(reader, operand)):
                    continue
                if first is None:
                    first = (reader, operand)
                else:
                    self.join(first[0], reader, self.operand(*first), self.operand(reader, operand))

    def join_sandwiched(self) -> None:
        changed = True
        while changed:
            changed = False
            feeds = {pair for _, _, pair in self._crossings(broadcast=True)}
            for value, (reader, operand), (small, large) in self._crossings(broadcast=False):
                if (small, large) not in feeds or self.node(reader) != small:
                    continue
                producer, index = self.defined[value]
                if self.node(producer) == large and self.join(
                    producer, reader, self.result(producer, index), self.operand(reader, operand)
                ):
                    changed = True

    def _crossings(self, *, broadcast: bool) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Uses of a value on the border of a small and a large group, as (value, use, (small group, large group)). The
        value spans the small group only: `broadcast` gives broadcasts into the large group, otherwise reductions of
        it."""
        for value, uses in self.readers.items():
            if value not in self.defined:
                continue
            producer, index = self.defined[value]
            if not self.joinable[producer]:
                continue
            made_spans = self.spans(producer, self.result(producer, index))
            for reader, operand in uses:
                if not self.joinable[reader] or self.node(producer) == self.node(reader):
                    continue
                read_spans = self.spans(reader, self.operand(reader, operand))
                if broadcast and made_spans and not read_spans:
                    yield value, (reader, operand), (self.node(producer), self.node(reader))
                if not broadcast and read_spans and not made_spans:
                    yield value, (reader, operand), (self.node(reader), self.node(producer))

    def members(self) -> list[list[int]]:
        """The nodes of each group, in program order, without nodes that touch small values only."""
        values = self.graph.values
        groups: dict[int, list[int]] = defaultdict(list)
        for n, node in enumerate(self.graph.nodes):
            touched = [v for v in (*node.operands, *node.results) if v is not None]
            if any(values[v].size > SMALL_SIZE for v in touched):
                groups[self.node(n)].append(n)
        return list(groups.values())


def _build(
    graph: Graph, rules: Sequence[Rule], joiner: _Joiner, nodes: Sequence[int], renewals: Mapping[int, int]
) -> Group:
    classes: dict[int, int] = {}
    factors: list[Factor] = []
    own_of: dict[int, tuple[int, ...]] = {}  # node -> its factors as indices of the group's
    for n in nodes:
        first, own = joiner.offset[n], []
        for i, factor in enumerate(rules[n].factors):
            root = joiner.factor(first + i)
            if root not in classes:
                classes[root] = len(factors)
                factors.append(factor)
            own.append(classes[root])
        own_of[n] = tuple(own)

    def local(node: int, dims: DimFactors) -> DimFactors:
        own = own_of[node]
        return tuple([tuple([own[f] for f in dim]) for dim in dims])

    reads: Mapping[tuple[int, DimFactors], list[tuple[int, int]]] = defaultdict(list)
    defines: list[Define] = []
    works: list[Work] = []
    for n in nodes:
        node, rule = graph.nodes[n], rules[n]
        for i, value in enumerate(node.operands):
            if value is not None and graph.values[value].size > SMALL_SIZE:
                reads[value, local(n, rule.operands[i])].append((n, i))
        own = own_of[n]
        pending = tuple(f for f, factor in zip(own, rule.factors, strict=True) if factor.reduction)
        kinds: list[Reduction] = [factor.reduction for factor in rule.factors if factor.reduction]
        for i, (value, dims) in enumerate(zip(node.results, rule.results, strict=True)):
            unreduced = (*pending, *(own[f] for f in rule.sums[i])) if rule.sums else pending
            defines.append(Define(value, n, local(n, dims), unreduced, kinds[0] if kinds else "sum"))
        first = graph.values[next((v for v in node.operands if v is not None), node.results[0])]
        stored = tuple(tuple(own[f] for f in factors) for factors in rule.stored)
        works.append(
            Work(
                own,
                rule.flops_per_point,
                traits_of(node.primitive).contraction,
                first.dtype,
                node.repeat,
                stored,
                first.itemsize,
                rule.matrix_flops_per_point,
                rule.matrix_efficiency,
            )
        )
    settled = {(d.value, d.dims) for d in defines if not d.pending}
    reads = {key: uses for key, uses in reads.items() if key not in settled}  # defined and fused inside the group
    compound = [dim for read in reads for dim in read[1] if len(dim) > 1]
    compound += [dim for define in defines for dim in define.dims if len(dim) > 1]
    equal = {f for n in nodes for f, factor in zip(own_of[n], rules[n].factors, strict=True) if factor.even}
    terms = _sums_of_terms(graph, nodes, reads, joiner)
    pending = (len(factors),)
    if terms is not None:
        factors.append(Factor(TERMS))
        zeros = {v for n in nodes if graph.nodes[n].primitive == "broadcast_in_dim" for v in graph.nodes[n].results}
        defines = [d if d.value in zeros else replace(d, pending=pending) for d in defines]
    group = Group(
        nodes=tuple(nodes),
        factors=tuple(factors),
        reads=tuple(
            Read(value, dims, tuple(uses), pending if terms and value in terms else ())
            for (value, dims), uses in reads.items()
        ),
        defines=tuple(defines),
        works=tuple(works),
        even=frozenset(f for dim in compound for f in dim) | equal,
        fixed=frozenset(f for dim in compound for f in dim[1:]),
        pinned=tuple((own_of[n][f], axes) for n in nodes for f, axes in rules[n].pinned),
        region=_region(nodes[0], rules[nodes[0]], local),
    )
    return _absorb(group, joiner, renewals)


#: The size of the factor over the terms of a sum over a loop's iterations; any number of devices may split it.
TERMS = 720720 * 64


def _sums_of_terms(
    graph: Graph,
    nodes: Sequence[int],
    reads: Mapping[tuple[int, DimFactors], list[tuple[int, int]]],
    joiner: _Joiner,
) -> set[int] | None:
    """The values that a group reads as terms, if all it does is to sum terms over a loop's iterations; otherwise None.

    Each device may sum its own terms, and the users of the loop's result may reduce the sum over devices. Results of an
    inner loop are no such terms: XLA moves a reduction out of one loop only.
    """
    members = set(nodes)
    sums = {pair for loop in graph.loops for pair in loop.sums if members.issuperset(pair)}
    enters, ends = {enter for enter, _ in sums}, {leave for _, leave in sums}
    if not sums:
        return None
    for n in nodes:
        node = graph.nodes[n]
        sizes = {graph.values[v].size if v is not None else 0 for v in (*node.operands, *node.results)}
        whole = len(sizes) == 1 and min(sizes) > SMALL_SIZE
        traits, leaves = traits_of(node.primitive), node.primitive == "exit_carry" and n in ends
        adds, passes = whole and traits.linear == "all", whole and (leaves or traits.one_to_one)
        begins = n in enters or (node.primitive == "broadcast_in_dim" and node.operands == (None,))
        if not (adds or passes or begins):
            return None
    return {
        value
        for (value, _), uses in reads.items()
        if not any(n in enters for n, _ in uses) and not _of_a_loop(graph, joiner, value)
    }


def _of_a_loop(graph: Graph, joiner: _Joiner, value: int | None) -> bool:
    """Whether a value is the result of a loop, or a cast of one."""
    if value is None or value not in joiner.defined:
        return False
    node = graph.nodes[joiner.defined[value][0]]
    if node.primitive == "convert_element_type":
        return _of_a_loop(graph, joiner, node.operands[0])
    return node.primitive in ("exit_carry", "exit_stack")


def _region(node: int, rule: Rule, local: Callable[[int, DimFactors], DimFactors]) -> Region | None:
    if not rule.manual:
        return None

    def class_of(factor: int) -> int:
        return local(node, ((factor,),))[0][0]

    return Region(
        node,
        frozenset(map(class_of, rule.manual)),
        tuple(local(node, dims) for dims in rule.operands),
        tuple(local(node, dims) for dims in rule.results),
        tuple(replace(one, factor=class_of(one.factor), dims=local(node, one.dims)) for one in rule.exchanges),
        tuple(replace(halo, factor=class_of(halo.factor)) for halo in rule.halos),
        None if rule.context is None else replace(rule.context, factor=class_of(rule.context.factor)),
    )


def _renewals(graph: Graph, absorbable: frozenset[int]) -> dict[int, int]:
    """Map each absorbable input to the output that updates it, without inputs that are also outputs and without updates
    that are several outputs."""
    times = Counter(graph.outputs)
    renewals: dict[int, int] = {}
    for position, out in graph.carried:
        value, after = graph.inputs[position], graph.outputs[out]
        if position in absorbable and after is not None and times[after] == 1 and value not in times:
            renewals[value] = after
    return renewals


def _absorb(group: Group, joiner: _Joiner, renewals: Mapping[int, int]) -> Group:
    """Move carried state that only this group reads and updates into the group, so that it has the group's sharding."""
    defined = {d.value: d.dims for d in group.defines}
    members = set(group.nodes)
    inputs: list[tuple[int, DimFactors]] = []
    for read in group.reads:
        if read.value not in renewals or defined.get(renewals[read.value]) != read.dims:
            continue
        if all(node in members for node, _ in joiner.readers[read.value]):
            inputs.append((read.value, read.dims))
    even = group.even | {f for _, dims in inputs for dim in dims for f in dim}
    taken = {value for value, _ in inputs}
    reads = tuple(r for r in group.reads if r.value not in taken)
    return replace(group, reads=reads, even=frozenset(even), inputs=tuple(inputs))
