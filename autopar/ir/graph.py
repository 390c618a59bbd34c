"""The graph: what a traced step computes, free of JAX.

In: built by `from_jaxpr`, one node per equation and in the same order, so that node *n* of the
graph is equation *n* of the trace. Out: read by coarsening, rules, cost and the planner.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Phase = Literal["forward", "backward", "update"]
#: An operand or a result of a node, by its position.
Tensor = tuple[Literal["operand", "result"], int]

#: Trips that a loop is priced for where the program does not say how many it makes: what moves inside it
#: should cost more than what moves before it.
UNKNOWN_TRIPS = 8.0


@dataclass(frozen=True, slots=True)
class Value:
    """One array: global shape, dtype name (`"bfloat16"`), bytes per element, how often a step makes it."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: float
    repeat: float = 1.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> float:
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Args:
        primitive: JAX's name of it, e.g. `dot_general`.
        params: its parameters as plain ints, strings, bools, tuples (JAX objects are left out).
        operands: value indices; None for a literal (a Python or NumPy scalar in the trace).
        results: value indices.
        path: module path from the name stack, e.g. `GPT/h_0/attn/qkv`.
        phase: forward, backward, or update (everything outside the differentiated function).
        source: `file.py:12 (function)` in the user's code, or "".
        effect: whether running it does more than compute (a print, a callback).
        repeat: how often a step runs it.
    """

    primitive: str
    params: Mapping[str, Any]
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    path: str = ""
    phase: Phase = "update"
    source: str = ""
    effect: bool = False
    repeat: float = 1.0


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop among the nodes.

    Args:
        start, stop: its nodes, with those that values go in by; those they come out by follow.
        trips: how many it makes.
        carries: of each value carried from trip to trip: the node it goes in by, and the one it comes out by.
        stacks: the nodes by which what all trips make comes out.
        sums: of the carries, those that start as zeros and that each trip adds to.
    """

    start: int
    stop: int
    trips: float
    carries: tuple[tuple[int, int], ...]
    stacks: tuple[int, ...]
    sums: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Graph:
    """A whole step. `inputs`, `constants` and `outputs` hold value indices; an output that is a
    literal is None. `carried` pairs (input position, output position) that hold the same state. Of `loops`, the
    inner ones come first. The nodes from one number to before another are the pieces of one of `barriers`."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    input_paths: tuple[str, ...]
    outputs: tuple[int | None, ...]
    output_paths: tuple[str, ...]
    constants: tuple[int, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    loops: tuple[Loop, ...] = ()
    barriers: tuple[tuple[int, int], ...] = ()

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """Of each value that a node makes, the node."""
        return {value: n for n, node in enumerate(self.nodes) for value in node.results}

    @cached_property
    def users(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """Of each value that a node reads, all (node, operand)s that do, in order."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for n, node in enumerate(self.nodes):
            for i, value in enumerate(node.operands):
                if value is not None:
                    found[value].append((n, i))
        return {value: tuple(uses) for value, uses in found.items()}

    @cached_property
    def touching(self) -> Mapping[int, Sequence[tuple[int, Tensor]]]:
        """Of each value, the nodes that read or make it, in order."""
        found: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for n, node in enumerate(self.nodes):
            for i, value in enumerate(node.operands):
                if value is not None:
                    found[value].append((n, ("operand", i)))
            for i, value in enumerate(node.results):
                found[value].append((n, ("result", i)))
        return found

    def producer(self, value: int) -> Node | None:
        """The node that makes a value; None of inputs and constants."""
        n = self.producers.get(value)
        return None if n is None else self.nodes[n]
