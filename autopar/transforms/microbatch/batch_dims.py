"""Where the batch stands: which dims of which values are the loop over the examples.

In: a graph. Out: `Batch`: its size and, of each value, the dims that it is, or that it is a part of. The sharding
rules say how each node passes a loop on; from the leading dims of the data it is followed to all that meets it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import MicrobatchError
from autopar.ir.graph import Graph, Node, Tensor
from autopar.rules.factors import DimFactors
from autopar.rules.node_view import of_each_node
from autopar.rules.table import rule_for, traits_of


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A dim that is the batch, or is made of it: of `(major, batch, minor)`, in this order.

    Args:
        dim: its position.
        minor: how many elements of the dim belong to one example, side by side.
    """

    dim: int
    minor: int = 1


@dataclass(frozen=True, slots=True)
class Factor:
    """The loop of a node that is the batch: one of its rule's factors, or a part of one."""

    index: int
    minor: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The loop over the examples.

    Args:
        size: how many there are.
        inputs: positions of the inputs that it was found in.
        places: of each value that holds examples, where. More than one where examples meet each other.
    """

    size: int
    inputs: tuple[int, ...]
    places: dict[int, frozenset[Place]]

    def of(self, value: int | None) -> Place | None:
        """Where a value holds the batch; None where it does not, or more than once."""
        found = self.places.get(value, frozenset()) if value is not None else frozenset()
        return next(iter(found)) if len(found) == 1 else None

    def touches(self, node: Node) -> bool:
        """Whether a node reads or makes a value that holds the batch."""
        return any(value in self.places for value in (*node.operands, *node.results))

    def local_shape(self, value: int, shape: Sequence[int], parts: int) -> tuple[int, ...]:
        """The shape of a part of the batch."""
        place = self.of(value)
        return tuple(size // parts if place and place.dim == d else size for d, size in enumerate(shape))


def num_examples(graph: Graph) -> int:
    """How many examples the data of a step holds.

    Raises:
        MicrobatchError: no input but carried state has a dim.
    """
    return leading_dim(graph)[0]


def leading_dim(graph: Graph) -> tuple[int, tuple[int, ...]]:
    """The length of the leading dim of most of the data, and the inputs that are as long.

    Of a step that gives examples back, what it predicts, it is one of the lengths of these: weights that it does not
    train are no data.
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
            " a leading dim. Pass the batch as an argument, or give `carry` if the batch was taken for state"
        )
    size = max(sizes, key=lambda s: (s in lengths, sizes[s], s))
    return size, tuple(leading[size])


class Places:
    """Follows dims through a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rules = of_each_node(graph, rule_for)
        #: What a loop carries is split alike in the next trip.
        self.tied: dict[int, set[int]] = defaultdict(set)
        for loop in graph.loops:
            for enter, leave in loop.carries:
                one, other = graph.nodes[enter].results[0], graph.nodes[leave].operands[0]
                if other is not None:
                    self.tied[one].add(other)
                    self.tied[other].add(one)

    def batch(self) -> Batch:
        """The loop over the examples: the leading dim of most of the data, and of all data that is as long.

        Raises:
            MicrobatchError: no input but carried state has a dim.
        """
        size, inputs = leading_dim(self.graph)
        return Batch(size, inputs, self.follow(size, [(self.graph.inputs[i], Place(0)) for i in inputs]))

    def follow(self, size: int, seeds: Iterable[tuple[int, Place]]) -> dict[int, frozenset[Place]]:
        """Where a loop of so many iterations stands that some values are known to hold."""
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
        """Operations of a step, on all devices together."""
        rule = self.rules[node]
        if rule is None:
            return 0.0
        each = rule.flops_per_point + sum(flops for _, flops in rule.matrix_flops_per_point)
        return math.prod(f.size for f in rule.factors) * each * self.graph.nodes[node].repeat

    def factor(self, node: int, batch: Batch) -> Factor | None:
        """The loop of a node that is the batch, where all its tensors agree and examples do not meet in it."""
        found: set[Factor | None] = set()
        for tensor, value in self._tensors(node):
            for place in batch.places.get(value, ()):
                found.add(self._factor(node, tensor, place, batch.size))
        if len(found) != 1:
            return None
        (one,) = found
        return one if one is not None and self.separable(node, one) else None

    def separable(self, node: int, factor: Factor) -> bool:
        """Whether a part of a loop is run by running the node on a part of its tensors."""
        rule, traits = self.rules[node], traits_of(self.graph.nodes[node].primitive)
        assert rule is not None
        one = factor.index
        if any(halo.factor == one for halo in rule.halos) or any(sent.factor == one for sent in rule.exchanges):
            return False
        if self.graph.nodes[node].effect or traits.opaque:
            return False
        if one in rule.manual and not traits.independent:
            return False
        return rule.factors[one].reduction is None or traits.terms

    def reduction(self, node: int, factor: Factor) -> str | None:
        """What combines the parts of a loop; None where each part has results of its own."""
        rule = self.rules[node]
        assert rule is not None
        return rule.factors[factor.index].reduction

    def created(self, node: int, factor: Factor) -> bool:
        """Whether a loop is one over results alone, which depend on the position in it."""
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
        """The factor that a place of one of a node's tensors is, or is a part of."""
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
        """All dims of a node's tensors that hold a loop."""
        rule = self.rules[node]
        assert rule is not None
        for tensor, value in self._tensors(node):
            for d, names in enumerate(self._dims(node, tensor)):
                if factor.index in names:
                    inner = names[names.index(factor.index) + 1 :]
                    yield value, Place(d, factor.minor * math.prod(rule.factors[i].size for i in inner))
