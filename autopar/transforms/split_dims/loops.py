"""Find the dims of values that belong to one loop, and what each node does to the loop.

In: a graph and one dim of one value. Out: `Loop`: all dims connected to it by nodes that pass the loop on unchanged. A
matmul passes the columns of its weight on to its result; a sum or a cast passes on all its dims.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Tensor
from autopar.rules.factors import DimFactors, Rule
from autopar.rules.node_view import NodeView
from autopar.rules.table import rule_for, traits_of
from autopar.transforms.split_dims.cuts import part_size

#: A value and a position among its dims.
Place = tuple[int, int]


@dataclass(slots=True)
class Loop:
    """Dims of one size that belong to one loop.

    Args:
        size: its length.
        places: the dims.
        follows: nodes that pass the loop on, or sum over it.
        absorbs: reshapes that merge or split it.
        cuts: nodes that cut it into equal parts or concatenate them, with the size of a part.
        blocks: nodes that need it as one dim.
    """

    size: int
    places: set[Place] = field(default_factory=set)
    follows: set[int] = field(default_factory=set)
    absorbs: set[int] = field(default_factory=set)
    cuts: dict[int, int] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)


class Loops:
    """Finds the loops of a graph, each when it is first requested.

    Args:
        followers: primitives that can run with two dims in place of one.
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
        """Record what a node does to the loop; returns the other dims that it passes the loop on to."""
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
        elif part is None or node in loop.cuts:  # a node cuts a loop in at most one of its tensors
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
        """All dims of a node's tensors that are this factor; None if a dim merges it with other factors."""
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
