"""Choose the dims to split in two (parts, and elements of a part), and the nodes that compute on the two dims.

In: a graph. Out: `Factored`s. A loop is the set of dims that correspond to each other across nodes (`loops`). If a node
splits a dim into equal parts (a fused QKV projection), the dim can be sharded only in whole parts. As two dims, the
inner one can be sharded before and after that node. Two kinds of loops are treated as two: a loop that a matmul shares
with a weight (a value computed from the program's inputs alone), and a loop with the same parts, as in the weight's
gradient. A reshape merges the two dims where they must be one again, above all at the program's inputs and outputs, and
may need resharding. A minimum cut of the graph chooses the nodes that compute on two dims: it maximizes the bytes that
are split into parts, less the bytes that are reshaped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import Graph, Tensor
from autopar.rules.table import traits_of
from autopar.solve.min_cut import source_side
from autopar.transforms.split_dims.cuts import CUTTING, part_size
from autopar.transforms.split_dims.loops import Loop, Loops, Place

#: Pieces that bring an input into a loop, a branch or a recomputation.
_BORDERS = frozenset(["enter_const", "enter_slice", "enter_branch", "barrier"])


@dataclass(frozen=True, slots=True)
class Factored:
    """A loop to treat as two.

    Args:
        size, part: size of the loop, and of the inner one of the two.
        places: the dims that belong to this loop.
        nodes: the nodes that compute on two dims.
    """

    size: int
    part: int
    places: frozenset[Place]
    nodes: frozenset[int]


def factored_loops(graph: Graph, followers: Collection[str]) -> tuple[Factored, ...]:
    """The loops to treat as two; none in most programs.

    Args:
        followers: primitives that can run with two dims in place of one.
    """
    loops = Loops(graph, followers)
    candidates = _candidates(loops)
    if not candidates:
        return ()
    weights = _made_of_inputs(graph, followers)
    met = [_meets_weight(graph, loop, weights) for loop, _ in candidates]
    parts = [_parts(loops, cuts) if any(met) else frozenset() for _, cuts in candidates]
    of_weights = frozenset[int]().union(*(one for one, meets in zip(parts, met, strict=True) if meets))
    found: list[Factored] = []
    for (loop, cuts), meets, of_loop in zip(candidates, met, parts, strict=True):
        if not meets and not of_loop & of_weights:
            continue
        part = _part(graph, cuts)
        nodes = _nodes(loops, loop, {n: size for n, size in cuts.items() if size == part})
        if nodes:
            found.append(Factored(loop.size, part, frozenset(loop.places), frozenset(nodes)))
    return tuple(found)


def _candidates(loops: Loops) -> list[tuple[Loop, dict[int, int]]]:
    """Loops that nodes split into parts: for each loop, these nodes and the size of their parts."""
    found: dict[int, tuple[Loop, dict[int, int]]] = {}

    def add(place: Place, node: int, part: int) -> None:
        loop = loops.of(place)
        found.setdefault(id(loop), (loop, {}))[1][node] = part

    for n, node in enumerate(loops.graph.nodes):
        if node.primitive not in CUTTING:
            continue
        sides: tuple[tuple[Tensor, int | None], ...] = (
            (("operand", 0), node.operands[0]),
            (("result", 0), node.results[0]),
        )
        for tensor, value in sides:
            if value is None:
                continue
            for d in range(len(loops.graph.values[value].shape)):
                part = part_size(loops.view(n), tensor, d)
                if part is not None and part > 1:
                    add((value, d), n, part)
                elif part == 1 and _all_taken(loops, n, value, d):
                    for merged, reshape, inner in _merged(loops, loops.of((value, d))):
                        add(merged, reshape, inner)
    return list(found.values())


def _all_taken(loops: Loops, node: int, value: int, dim: int) -> bool:
    """Whether a dim cut into parts of one element is a stack whose slices are all used. A sequence of which only one
    token is read is no stack."""
    primitive = loops.graph.nodes[node].primitive
    if primitive not in ("slice", "pad"):
        return True
    slices = [n for n, _ in loops.graph.users.get(value, ()) if loops.graph.nodes[n].primitive == "slice"]
    cut = {loops.view(n).params["start_indices"][dim] for n in slices if part_size(loops.view(n), ("operand", 0), dim)}
    return primitive == "slice" and len(cut) == loops.graph.values[value].shape[dim]


def _merged(loops: Loops, loop: Loop) -> Iterator[tuple[Place, int, int]]:
    """Dims that a reshape makes by merging this loop with the dims inside it, each with the size of the inner dims.

    For example, `[3, 12, 64]` reshaped to 2,304 is a dim with parts of 768.
    """
    for n in loop.absorbs:
        node = loops.graph.nodes[n]
        before, after = node.operands[0], node.results[0]
        if before is None or node.params.get("dimensions") is not None:
            continue
        for one, other in ((before, after), (after, before)):
            shape, merged = loops.graph.values[one].shape, loops.graph.values[other].shape
            for d in (d for v, d in loop.places if v == one):
                inner = 1
                for size in shape[d + 1 :]:
                    inner *= size
                stride = 1
                for e in reversed(range(len(merged))):
                    if stride * merged[e] == inner * shape[d] and inner % stride == 0 and inner > stride:
                        yield (other, e), n, inner // stride
                    stride *= merged[e]


def _made_of_inputs(graph: Graph, followers: Collection[str]) -> set[int]:
    """Inputs, and values computed from them by casts, sums and data movement alone."""
    found = {*graph.inputs, *graph.constants}
    known = frozenset(followers) | CUTTING | _BORDERS
    passing = {name for name in known if not traits_of(name).contraction}
    for node in graph.nodes:
        values = [v for v in node.operands if v is not None]
        if node.primitive in passing and values and found.issuperset(values):
            found.update(node.results)
    return found


def _meets_weight(graph: Graph, loop: Loop, weights: set[int]) -> bool:
    """Whether a matmul has this loop in a weight."""
    read = {v for n in loop.follows if traits_of(graph.nodes[n].primitive).contraction for v in graph.nodes[n].operands}
    return any(value in read and value in weights for value, _ in loop.places)


def _parts(loops: Loops, cuts: dict[int, int]) -> frozenset[int]:
    """The loops within one part.

    A weight's gradient is computed from the gradients of the parts of a matmul's result. These belong to the same loop
    as the parts, although the whole gradient and the whole result may be two different loops.
    """
    found: set[int] = set()
    for n, size in cuts.items():
        node = loops.graph.nodes[n]
        whole, parts = ((node.operands[0],), node.results)
        if traits_of(node.primitive).joins:
            whole, parts = node.results, node.operands
        shape = loops.graph.values[whole[0]].shape if whole[0] is not None else ()
        for value in parts:
            own = loops.graph.values[value].shape if value is not None else ()
            if value is not None and len(own) == len(shape):
                dims = [d for d in range(len(own)) if own[d] != shape[d] and own[d] == size]
                found.update(id(loops.of((value, d))) for d in dims)
    return frozenset(found)


def _part(graph: Graph, cuts: dict[int, int]) -> int:
    """The part size that splits the most bytes into parts."""
    gains: dict[int, float] = defaultdict(float)
    for n, part in cuts.items():
        gains[part] += _bytes_cut(graph, n)
    return max(gains, key=lambda part: (gains[part], part))


def _bytes_cut(graph: Graph, node: int) -> float:
    """Bytes that a cutting node moves: the smaller of its operands and its results."""
    one = graph.nodes[node]
    read = sum(graph.values[v].num_bytes for v in one.operands if v is not None)
    return min(read, sum(graph.values[v].num_bytes for v in one.results))


# -- the minimum cut ---------------------------------------------------------------------------


def _nodes(loops: Loops, loop: Loop, cuts: dict[int, int]) -> set[int]:
    """The nodes that see two dims; empty if no choice saves bytes."""
    free = loop.absorbs - cuts.keys()
    inside = (loop.follows | cuts.keys()) - free
    network = _Network()
    for n in cuts:
        network.gain(n, _bytes_cut(loops.graph, n))
    outputs = {v for v in loops.graph.outputs if v is not None}
    for value in {v for v, _ in loop.places}:
        num_bytes = loops.graph.values[value].num_bytes
        producer, uses = loops.graph.producers.get(value), loops.graph.users.get(value, ())
        if producer in free:
            continue
        ends = {n if n in inside else None for n, _ in uses if n not in free}
        ends |= {None} if value in outputs else set()
        network.value(producer if producer in inside else None, ends, num_bytes)
    return network.chosen()


class _Network:
    """The minimum cut; nodes on the source side see two dims."""

    SOURCE, SINK = 0, 1

    def __init__(self) -> None:
        self.ids: dict[int | None, int] = {None: self.SINK}
        self.count = 2
        self.arcs: list[tuple[int, int, float]] = []

    def gain(self, node: int, num_bytes: float) -> None:
        self.arcs.append((self.SOURCE, self._id(node), num_bytes))

    def value(self, producer: int | None, readers: set[int | None], num_bytes: float) -> None:
        """Add a value: it is reshaped once if its producer and any of its users are on different sides."""
        made = self._id(producer)
        forth, back = self.count, self.count + 1
        self.count += 2
        self.arcs += [(made, forth, num_bytes), (back, made, num_bytes)]
        for reader in readers:
            self.arcs += [(forth, self._id(reader), np.inf), (self._id(reader), back, np.inf)]

    def chosen(self) -> set[int]:
        endless = 1 + sum(int(capacity) for _, _, capacity in self.arcs if np.isfinite(capacity))
        arcs = [
            (tail, head, int(capacity) if np.isfinite(capacity) else endless)
            for tail, head, capacity in self.arcs
            if tail != self.SINK and head != self.SOURCE and tail != head
        ]
        side = source_side(arcs, self.SOURCE, self.SINK)
        return {node for node, i in self.ids.items() if node is not None and i in side}

    def _id(self, node: int | None) -> int:
        if node not in self.ids:
            self.ids[node] = self.count
            self.count += 1
        return self.ids[node]
