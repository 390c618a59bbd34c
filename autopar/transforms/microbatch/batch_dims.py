"""Find the batch dims: which dims of which values run over the examples.

In: a graph. Out: `Batch`: its size and, for each value, the dims that are the batch or contain it. The search starts
from the leading dims of the data. The sharding rules say through which dims each node passes the batch on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import MicrobatchError
from autopar.frontend.kernel_loops import LOOPS
from autopar.ir.graph import Graph, Node, Tensor
from autopar.rules.factors import DimFactors
from autopar.rules.node_view import of_each_node
from autopar.rules.table import rule_for, traits_of


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A dim that is the batch or contains it, as the middle factor of `(major, batch, minor)`.

    Args:
        dim: position of the dim in the tensor.
        minor: number of consecutive elements of the dim that belong to one example.
    """

    dim: int
    minor: int = 1


@dataclass(frozen=True, slots=True)
class Factor:
    """The batch within a node: one factor of the node's rule, or a part of one."""

    index: int
    minor: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The loop over the examples.

    Args:
        size: number of examples.
        inputs: positions of the inputs whose leading dim is the batch.
        places: for each value that holds examples, its batch dims. A value has several where examples are combined with
            each other.
    """

    size: int
    inputs: tuple[int, ...]
    places: dict[int, frozenset[Place]]

    def of(self, value: int | None) -> Place | None:
        """The batch dim of a value; None if it has none or several."""
        found = self.places.get(value, frozenset()) if value is not None else frozenset()
        return next(iter(found)) if len(found) == 1 else None

    def touches(self, node: Node) -> bool:
        """Whether a node reads or makes a value with a batch dim."""
        return any(value in self.places for value in (*node.operands, *node.results))

    def local_shape(self, value: int, shape: Sequence[int], parts: int) -> tuple[int, ...]:
        """The shape of one of `parts` equal parts of the batch."""
        place = self.of(value)
        return tuple(size // parts if place and place.dim == d else size for d, size in enumerate(shape))


def num_examples(graph: Graph) -> int:
    """The number of examples in a step's data.

    Raises:
        MicrobatchError: no input has a dim, except carried state.
    """
    return leading_dim(graph)[0]


def leading_dim(graph: Graph) -> tuple[int, tuple[int, ...]]:
    """The leading dim's length in most of the data by bytes, and the inputs of that length.

    If the step returns non-carried arrays, such as predictions, the length must be the leading dim of one of them: this
    excludes frozen weights.
    """
    carried = {position for position, _ in graph.carried}
    renewed = {position for _, position in graph.carried}
    given = [graph.values[v].shape for i, v in enumerate(graph.outputs) if v is not None and i not in renewed]
    lengths = {shape[0] for shape in given if shape}
    sizes: dict[int, float] = defaultdict(float)
    leading: dict[int, list[int]] = defaultdict(list)
    for position, value in enumerate(graph.inputs):
        info = graph.values[value]
        if position not in carried and info.shape and info.shape[0] > 1:
            sizes[info.shape[0]] += info.num_bytes
            leading[info.shape[0]].append(position)
    if not sizes:
        raise MicrobatchError(
            "the step has no batch to split into microbatches: no argument but carried state holds an array with"
            " a leading dim of at least 2. Pass the batch as an argument, or give `carry` if the batch was mistaken for state"
        )
    size = max(sizes, key=lambda s: (s in lengths, sizes[s], s))
    return size, tuple(leading[size])


class Places:
    """Follows batch dims through a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rules = of_each_node(graph, rule_for)
        #: A loop's carry has the same batch dims at the start and the end of an iteration.
        self.tied: dict[int, set[int]] = defaultdict(set)
        for loop in graph.loops:
            for enter, leave in loop.carries:
                one, other = graph.nodes[enter].results[0], graph.nodes[leave].operands[0]
                if other is not None:
                    self.tied[one].add(other)
                    self.tied[other].add(one)

    def batch(self) -> Batch:
        """The loop over the examples: the leading dim of most of the data, and of all other data of that length.

        Raises:
            MicrobatchError: no input has a dim, except carried state.
        """
        size, inputs = leading_dim(self.graph)
        return Batch(size, inputs, self.follow(size, [(self.graph.inputs[i], Place(0)) for i in inputs]))

    def follow(self, size: int, seeds: Iterable[tuple[int, Place]]) -> dict[int, frozenset[Place]]:
        """All dims that belong to a loop of `size` iterations, found from the dims in `seeds`."""
        found: dict[int, set[Place]] = defaultdict(set)
        waiting = list(seeds)
        while waiting:
            value, place = waiting.pop()
            if place in found[value]:
                continue
            found[value].add(place)
            waiting += [(other, place) for other in self.tied[value]]
            for n, tensor in self.graph.touching[value]:
                factor = self._factor(n, tensor, place, size)
                if factor is not None and self.separable(n, factor):
                    waiting += self._with(n, factor)
        return {value: frozenset(places) for value, places in found.items()}

    # -- one node ----------------------------------------------------------------------------

    def flops(self, node: int) -> float:
        """FLOPs of a node in one step, on all devices together."""
        rule = self.rules[node]
        if rule is None:
            return 0.0
        each = rule.flops_per_point + sum(flops for _, flops in rule.matrix_flops_per_point)
        return math.prod(f.size for f in rule.factors) * each * self.graph.nodes[node].repeat

    def factor(self, node: int, batch: Batch) -> Factor | None:
        """The factor of a node that is the batch, if all its tensors agree on it and the node can run on part of it."""
        found: set[Factor | None] = set()
        for tensor, value in self._tensors(node):
            for place in batch.places.get(value, ()):
                found.add(self._factor(node, tensor, place, batch.size))
        if len(found) != 1:
            return None
        (one,) = found
        return one if one is not None and self.separable(node, one) else None

    def separable(self, node: int, factor: Factor) -> bool:
        """Whether the node, run on parts of its tensors, computes a part of this loop."""
        rule, traits = self.rules[node], traits_of(self.graph.nodes[node].primitive)
        assert rule is not None
        one = factor.index
        if any(halo.factor == one for halo in rule.halos) or any(sent.factor == one for sent in rule.exchanges):
            return False
        is_kernel = LOOPS in self.graph.nodes[node].params  # it runs on parts of its own loops alone
        if self.graph.nodes[node].effect or (traits.opaque and not is_kernel) or (is_kernel and one not in rule.manual):
            return False
        if any(one in factors for factors in rule.sums) or (one in rule.manual and not traits.independent):
            return False
        return rule.factors[one].reduction is None or traits.terms

    def reduction(self, node: int, factor: Factor) -> str | None:
        """The reduction that combines the results of parts of a loop; None if each part has separate results."""
        rule = self.rules[node]
        assert rule is not None
        return rule.factors[factor.index].reduction

    def created(self, node: int, factor: Factor) -> bool:
        """Whether the factor is in the results alone, and their elements depend on the position in it, as in `iota`."""
        rule = self.rules[node]
        assert rule is not None
        if any(factor.index in names for dims in rule.operands for names in dims):
            return False
        return not traits_of(self.graph.nodes[node].primitive).uniform

    def _tensors(self, node: int) -> Iterator[tuple[Tensor, int]]:
        one = self.graph.nodes[node]
        for i, value in enumerate(one.operands):
            if value is not None:
                yield ("operand", i), value
        for i, value in enumerate(one.results):
            yield ("result", i), value

    def _dims(self, node: int, tensor: Tensor) -> DimFactors:
        rule = self.rules[node]
        if rule is None:
            return ()
        sides = rule.operands if tensor[0] == "operand" else rule.results
        return sides[tensor[1]] if tensor[1] < len(sides) else ()

    def _factor(self, node: int, tensor: Tensor, place: Place, size: int) -> Factor | None:
        """The factor that a place in one of a node's tensors is, or is a part of."""
        rule, dims = self.rules[node], self._dims(node, tensor)
        if rule is None or place.dim >= len(dims):
            return None
        low = 1
        for index in reversed(dims[place.dim]):
            high = low * rule.factors[index].size
            if low <= place.minor and place.minor * size <= high:
                return Factor(index, place.minor // low) if place.minor % low == 0 else None
            low = high
        return None

    def _with(self, node: int, factor: Factor) -> Iterator[tuple[int, Place]]:
        """All dims of a node's tensors that contain this factor."""
        rule = self.rules[node]
        assert rule is not None
        for tensor, value in self._tensors(node):
            for d, names in enumerate(self._dims(node, tensor)):
                if factor.index in names:
                    inner = names[names.index(factor.index) + 1 :]
                    yield value, Place(d, factor.minor * math.prod(rule.factors[i].size for i in inner))
