"""Which dims of which values are one loop of the program, and what each node does to it.

In: a graph and one dim of one value. Out: `Loop`: all dims that no node between them cuts, joins or reorders.
A matrix product passes the columns of its weights on to its result, a sum or a cast passes on all its dims.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Tensor
from autopar.rules.factors import DimFactors, Rule
from autopar.rules.node_view import NodeView
from autopar.rules.table import rule_for, traits_of
from autopar.transforms.split_dims.cuts import part_size

#: A dim of a value.
Place = tuple[int, int]


@dataclass(slots=True)
class Loop:
    """Dims of one size that are one loop.

    Args:
        size: how long.
        places: the dims.
        follows: nodes that pass the loop on, or sum over it.
        absorbs: reshapes that make something else of it.
        cuts: nodes that cut it into equal parts or make it of such, with the size of a part.
        blocks: nodes that need it as it is.
    """

    size: int
    places: set[Place] = field(default_factory=set)
    follows: set[int] = field(default_factory=set)
    absorbs: set[int] = field(default_factory=set)
    cuts: dict[int, int] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)


class Loops:
    """Finds the loops of a graph, each at its first mention.

    Args:
        followers: primitives that can be written for two dims in place of one.
    """

    def __init__(self, graph: Graph, followers: Collection[str]) -> None:
        self.graph, self.followers = graph, followers
        self.found: dict[Place, Loop] = {}
        self.views: dict[int, NodeView] = {}
        self.rules: dict[int, Rule | None] = {}

    def view(self, node: int) -> NodeView:
        if node not in self.views:
            self.views[node] = NodeView.of(self.graph.nodes[node], self.graph)
        return self.views[node]

    def of(self, place: Place) -> Loop:
        """The loop that a dim belongs to."""
        if place in self.found:
            return self.found[place]
        loop = Loop(self.graph.values[place[0]].shape[place[1]])
        waiting = [place]
        while waiting:
            value, dim = waiting.pop()
            if (value, dim) in loop.places:
                continue
            loop.places.add((value, dim))
            self.found[value, dim] = loop
            for node, tensor in self.graph.touching[value]:
                waiting += self._through(loop, node, tensor, dim)
        loop.cuts = {n: part for n, part in loop.cuts.items() if n not in loop.blocks}
        loop.follows -= loop.blocks | loop.cuts.keys()
        loop.absorbs -= loop.blocks
        return loop

    def _through(self, loop: Loop, node: int, tensor: Tensor, dim: int) -> list[Place]:
        """Notes what a node does to the loop; the other dims it passes it on to."""
        primitive = self.graph.nodes[node].primitive
        dims = self._dims(node, tensor)
        names = dims[dim] if dims is not None else ()
        if primitive in self.followers and len(names) == 1 and not self.graph.nodes[node].effect:
            passed = self._with_factor(node, names[0])
            if passed is not None:
                loop.follows.add(node)
                return passed
        part = part_size(self.view(node), tensor, dim)
        if traits_of(primitive).reshapes:
            loop.absorbs.add(node)
        elif part is None or node in loop.cuts:  # a node may cut a loop in one of its tensors only
            loop.blocks.add(node)
        else:
            loop.cuts[node] = part
        return []

    def _dims(self, node: int, tensor: Tensor) -> DimFactors | None:
        if node not in self.rules:
            self.rules[node] = rule_for(self.view(node))
        rule = self.rules[node]
        if rule is None:
            return None
        return (rule.operands if tensor[0] == "operand" else rule.results)[tensor[1]]

    def _with_factor(self, node: int, factor: int) -> list[Place] | None:
        """All dims of a node's tensors that are one factor; None where a dim is made of it and of another."""
        rule = self.rules[node]
        assert rule is not None
        one = self.graph.nodes[node]
        found: list[Place] = []
        for value, dims in zip((*one.operands, *one.results), (*rule.operands, *rule.results), strict=True):
            for d, names in enumerate(dims):
                if factor in names and len(names) > 1:
                    return None
                if factor in names and value is not None:
                    found.append((value, d))
        return found
