"""Derive the sharding constraints that make XLA's SPMD partitioner communicate as the explicit program does.

In: an `ExplicitProgram`, pins. Out: `Constraint`s, which leave the partitioner no choice. A value that leaves its group is
constrained at its definition, after any pending reduction: without the constraint XLA would merge the reduction with a reshard
and gather the operands. An operand that its user reads in another sharding has one constraint per reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.formulate.formulation import Formulation
from autopar.ir.explicit_program import Communicate, ExplicitProgram
from autopar.ir.graph import Graph
from autopar.ir.node_names import NodeNames
from autopar.ir.sharding import TensorSharding, replicated
from autopar.plans.records import Constraint
from autopar.rules.control_flow import BORDERS, PINNED
from autopar.rules.grouping import SMALL_SIZE
from autopar.rules.indexing import INDEXING
from autopar.rules.table import traits_of

_Path = tuple[TensorSharding, ...]


def constraints_of(
    f: Formulation, explicit: ExplicitProgram, pins: Mapping[int, TensorSharding]
) -> tuple[Constraint, ...]:
    """All constraints, in the order of their places.

    Args:
        pins: input position -> sharding.
    """
    moved = {value: uses for value, uses in _moved(f.graph, explicit).items() if value in f.value_made}
    defined = _at_definitions(f, explicit, moved)
    at_operands = _at_operands(f, explicit, defined, moved)
    small = *_small_pins(f, pins), *_small_indices(f), *_small_operands(f, explicit)
    return _by_name(f.graph, (*defined.values(), *at_operands, *small))


def with_constraints(graph: Graph, known: Sequence[Constraint], more: Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Constraints of a plan and more of them, in the order of their places."""
    return _by_name(graph, (*known, *more))


#: A use of a value: node and operand (for an output, the number of nodes and its position), and the moves that lead to it.
_Use = tuple[int, int, tuple[Communicate, ...]]


def _moved(graph: Graph, explicit: ExplicitProgram) -> dict[int, list[_Use]]:
    """The uses of each value."""
    found: dict[int, list[_Use]] = defaultdict(list)
    outputs = (((len(graph.nodes), i), array) for i, array in enumerate(explicit.outputs) if array is not None)
    for (node, operand), array in (*explicit.reads.items(), *outputs):
        found[explicit.arrays[array].value].append((node, operand, _moves_to(explicit, array)))
    return found


def _moves_to(explicit: ExplicitProgram, array: int) -> tuple[Communicate, ...]:
    """The moves from a value's definition to an array."""
    moves: list[Communicate] = []
    while (op := explicit.sent_as.get(array)) is not None and op.operand is not None:
        moves.append(op)
        array = op.operand
    return tuple(reversed(moves))


def _results(explicit: ExplicitProgram, moves: Sequence[Communicate]) -> _Path:
    """The shardings to which moves lead, with all pending reductions done."""
    return tuple(explicit.arrays[op.result].sharding.resolved() for op in moves if op.result is not None)


def _at_definitions(
    f: Formulation, explicit: ExplicitProgram, moved: Mapping[int, Sequence[_Use]]
) -> dict[int, Constraint]:
    """Constraints at definitions, by value."""
    arguments, primitives = set(f.graph.inputs), {*BORDERS, *PINNED}
    borders = {v for node in f.graph.nodes if node.primitive in primitives for v in node.results}
    found: dict[int, Constraint] = {}
    for value in f.value_made:
        made = explicit.arrays[explicit.made[value]].sharding
        if value in arguments or f.graph.values[value].size <= SMALL_SIZE:
            continue
        if value in f.written or made.unreduced or value in borders:
            path = (made.resolved(),)
            if len(made.unreduced) > 1:
                path = _scattered(explicit, moved.get(value, ())) or path
            barrier = _is_sliced_by_each_user(f, value, made, path[-1])
            found[value] = Constraint(value=value, shardings=path, barrier=barrier)
    return found


def _at_operands(
    f: Formulation,
    explicit: ExplicitProgram,
    defined: Mapping[int, Constraint],
    moved: Mapping[int, Sequence[_Use]],
) -> Iterator[Constraint]:
    for value, uses in moved.items():
        made = explicit.arrays[explicit.made[value]].sharding.resolved()
        start = defined[value].shardings[-1] if value in defined else made
        for node, operand, moves in uses:
            path, by = [start], [""]
            results = _results(explicit, moves)
            first = results.index(start) + 1 if start in results else 0
            for after, op in zip(results[first:], moves[first:], strict=True):
                if after != path[-1]:
                    path.append(after)
                    by.append(op.by)
            if path[1:]:
                yield _at_operand(value, (node, operand), path, by)


def _at_operand(value: int, use: tuple[int, int], path: Sequence[TensorSharding], by: Sequence[str]) -> Constraint:
    """A constraint for one use. It contains the sharding from which a registered collective starts.

    Args:
        use: node and operand.
        path: shardings from the definition on.
        by: the registered collective that leads to each sharding; empty for XLA's.
    """
    node, operand = use
    first = 0 if by[1] else 1
    named = tuple(by[first:]) if any(by) else ()
    return Constraint(value=value, shardings=tuple(path[first:]), node=node, operand=operand, by=named)


def _scattered(explicit: ExplicitProgram, uses: Sequence[_Use]) -> _Path:
    """The reduce-scatters of a reduction over several axes, as shardings, if all users want the same ones; else empty.

    With a constraint for each step XLA reduce-scatters. With a constraint for the result alone, it would all-reduce over all
    axes and then slice.
    """
    steps = {_results(explicit, [op for op in moves if op.kind == "reduce-scatter"]) for _, _, moves in uses}
    return steps.pop() if len(steps) == 1 else ()


def _is_sliced_by_each_user(f: Formulation, value: int, made: TensorSharding, split: TensorSharding) -> bool:
    """Whether XLA would all-reduce a value over several axes and let each user slice it, where the plan reduce-scatters it over
    some of the axes and all-reduces it over the others.

    XLA reduce-scatters the result of a matmul or convolution at once. It splits any other reduction in two only if the value
    has a single user.
    """
    scattered = {axis for axes in split.dims for axis in axes} & set(made.unreduced)
    if not scattered or scattered.issuperset(made.unreduced):
        return False
    producer = f.graph.producer(value)
    traits = traits_of(producer.primitive if producer is not None else "")
    return not (traits.contraction and traits.terms)


def _by_name(graph: Graph, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Constraints with the names of their places, sorted by place."""
    names = NodeNames(graph)

    def named(one: Constraint) -> Constraint:
        if one.node is None or one.operand is None:
            return replace(one, at=names.value(one.value))
        return replace(one, at=names.reading(one.node, one.operand))

    return tuple(sorted(map(named, constraints), key=lambda one: names.order(one.value, one.node, one.operand)))


def _small_indices(f: Formulation) -> Iterator[Constraint]:
    """Replicate the indices of gathers and scatters if they are too small to plan for. Unconstrained, XLA would shard the
    indices like the result, and its partitioner may then fail on meshes of several axes."""
    for n, node in enumerate(f.graph.nodes):
        indices = node.operands[1] if node.primitive in INDEXING else None
        if indices is not None and f.graph.values[indices].size <= SMALL_SIZE:
            whole = replicated(len(f.graph.values[indices].shape))
            yield Constraint(value=indices, shardings=(whole,), node=n, operand=1)


def _small_operands(f: Formulation, explicit: ExplicitProgram) -> Iterator[Constraint]:
    """Replicate operands that are too small to plan for, come from split values, and are read with large values that the plan splits over
    other axes. Unconstrained, the partitioner would split the large values over these axes, too, and gather them."""
    graph, axes = f.graph, defaultdict[int, set[str]](set)
    is_small = [value.size <= SMALL_SIZE for value in graph.values]
    for n, node in enumerate(graph.nodes):
        touched = [v for v in (*node.operands, *node.results) if v is not None]
        if all(is_small[v] for v in touched):
            for value in node.results:
                axes[value] |= {axis for v in touched for axis in axes[v]}
            continue
        large = [(i, v) for i, v in enumerate(node.operands) if v is not None and not is_small[v]]
        own = _axes(explicit, (explicit.reads[n, i] for i, _ in large))
        own |= _axes(explicit, (explicit.made[v] for v in node.results))
        for i, value in enumerate(node.operands):
            if value is not None and is_small[value] and axes[value] - own and graph.values[value].shape:
                whole = replicated(len(graph.values[value].shape))
                yield Constraint(value=value, shardings=(whole,), node=n, operand=i)
        for value in node.results:
            if is_small[value]:
                axes[value] |= _axes(explicit, [explicit.made[value]])


def _axes(explicit: ExplicitProgram, arrays: Iterable[int]) -> set[str]:
    """The mesh axes over which arrays are split."""
    return {axis for array in arrays for dim in explicit.arrays[array].sharding.dims for axis in dim}


def _small_pins(f: Formulation, pins: Mapping[int, TensorSharding]) -> Iterator[Constraint]:
    """Replicate sharded pinned values that are too small to plan for, wherever they are used, and the outputs that update them.
    Unconstrained, the partitioner would propagate their sharding to large values."""
    updates = dict(f.graph.carried)
    small = {position for position, sharding in pins.items() if any(sharding.dims)} - set(f.input_decision)
    whole = {f.graph.inputs[p]: (replicated(len(pins[p].dims)),) for p in small}
    for n, node in enumerate(f.graph.nodes):
        for i, value in enumerate(node.operands):
            if value in whole:
                yield Constraint(value=value, shardings=whole[value], node=n, operand=i)
    for position in sorted(small & set(updates)):
        after, before = f.graph.outputs[updates[position]], f.graph.inputs[position]
        if after is not None and after != before:
            yield Constraint(value=after, shardings=whole[before], node=len(f.graph.nodes), operand=updates[position])
