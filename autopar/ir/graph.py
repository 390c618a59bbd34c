"""Define the dataflow graph of a traced step, without JAX.

In: built by `from_jaxpr`, with one node per equation in the same order: node *n* of the graph is equation *n* of the
trace. Out: `Graph`, which coarsening, rules, cost and the planner read.
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

#: Assumed trip count of a loop of unknown length, so that communication inside it costs more than before it.
UNKNOWN_TRIP_COUNT = 8.0


@dataclass(frozen=True, slots=True)
class Value:
    """One array.

    Args:
        shape: global shape.
        dtype: name of the dtype, e.g. `"bfloat16"`.
        itemsize: bytes per element.
        repeat: number of times per step that it is computed.
    """

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
        primitive: name of the JAX primitive, e.g. `dot_general`.
        params: parameters as plain ints, strings, bools and tuples, without JAX objects.
        operands: value indices; None for a literal (a Python or NumPy scalar in the trace).
        results: value indices.
        path: module path from the name stack, e.g. `GPT/h_0/attn/qkv`.
        phase: forward, backward, or update (everything outside the differentiated function).
        source: `file.py:12 (function)` in the user's code, or "".
        effect: whether it has a side effect (a print, a callback).
        repeat: number of runs per step.
        rematerialized: whether it computes a forward value again in the backward pass.
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
    rematerialized: bool = False


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop among the nodes.

    Args:
        start, stop: its nodes [start, stop), which include the entry nodes; its exit nodes follow.
        num_iterations: trip count.
        carries: entry node and exit node of each value carried between iterations.
        stacks: exit nodes of stacked outputs.
        sums: carries that start as zeros and that each iteration adds to.
    """

    start: int
    stop: int
    num_iterations: float
    carries: tuple[tuple[int, int], ...]
    stacks: tuple[int, ...]
    sums: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Graph:
    """A whole step.

    Args:
        inputs, constants, outputs: value indices; None for an output that is a literal.
        carried: pairs (input position, output position) that hold the same state.
        loops: loops, inner ones first.
        barriers: ranges [start, stop) of nodes that form one optimization barrier each.
    """

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
        """The node that produces each value; inputs and constants have none."""
        return {value: n for n, node in enumerate(self.nodes) for value in node.results}

    @cached_property
    def users(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """All (node, operand)s that read each value, in order."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for n, node in enumerate(self.nodes):
            for i, value in enumerate(node.operands):
                if value is not None:
                    found[value].append((n, i))
        return {value: tuple(uses) for value, uses in found.items()}

    @cached_property
    def touching(self) -> Mapping[int, Sequence[tuple[int, Tensor]]]:
        """The nodes that read or produce each value, in order."""
        found: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for n, node in enumerate(self.nodes):
            for i, value in enumerate(node.operands):
                if value is not None:
                    found[value].append((n, ("operand", i)))
            for i, value in enumerate(node.results):
                found[value].append((n, ("result", i)))
        return found

    def producer(self, value: int) -> Node | None:
        """The node that produces a value; None for inputs and constants."""
        n = self.producers.get(value)
        return None if n is None else self.nodes[n]
