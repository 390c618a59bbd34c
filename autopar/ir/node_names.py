"""Names of a graph's nodes and values that last when others come or go: `forward GPT/h_0/mlp dot_general #1`.

In: a graph. Out: for each value, or where it is read, a text by phase, module, primitive, and which of these in the module;
and the order to list them in. A layer more names its own nodes, and renames no other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

from autopar.ir.graph import Graph, Node, Phase


class NodeNames:
    """Names in one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._modules = tuple(_modules(graph))
        self._given = dict(zip(graph.inputs, graph.input_paths, strict=True))
        self._numbers: list[int] = []
        count: Counter[tuple[str, ...]] = Counter()
        for node, module in zip(graph.nodes, self._modules, strict=True):
            kind = (module, node.phase, node.primitive)
            count[kind] += 1
            self._numbers.append(count[kind])

    def value(self, value: int) -> str:
        """Of a value, by what makes it.

        Args:
            value: its number in the graph.
        """
        if value not in self._graph.producers:
            return self._given.get(value, "a constant")
        node = self._graph.producers[value]
        results = self._graph.nodes[node].results
        return self._node(node) + (f", result {results.index(value)}" if len(results) > 1 else "")

    def reading(self, node: int, operand: int) -> str:
        """Of one operand of a node; the node after the last reads the outputs of the step."""
        if node == len(self._graph.nodes):
            return self._graph.output_paths[operand]
        return f"{self._node(node)}, operand {operand}"

    def order(self, value: int, node: int | None, operand: int | None) -> tuple[Any, ...]:
        """What sorts values and readings by module, as people number these, and then as the step runs."""
        if node == len(self._graph.nodes):
            return 2, by_number(self._graph.output_paths[operand or 0])
        at = self._graph.producers.get(value) if node is None else node
        if at is None:
            return 0, by_number(self._given.get(value, ""))
        phase = get_args(Phase).index(self._graph.nodes[at].phase)
        return 1, by_number(self._modules[at]), phase, at, -1 if operand is None else operand

    def _node(self, n: int) -> str:
        node = self._graph.nodes[n]
        words = filter(None, (node.phase, self._modules[n], node.primitive))
        return f"{' '.join(words)} #{self._numbers[n]}"


def by_number(text: str) -> tuple[str | int, ...]:
    """A key that sorts `h_2` before `h_10`.

    >>> sorted(["h_10", "h_2"], key=by_number)
    ['h_2', 'h_10']
    """
    parts = re.split(r"(\d+)", text)
    return tuple(int(part) if n % 2 else part for n, part in enumerate(parts))


def _modules(graph: Graph) -> Iterator[str]:
    """Of each node its module. Where it stands in none, as an optimizer does, that of the array it works on: the largest
    input that it reads, or else what made the largest value."""
    origin = dict(zip(graph.inputs, graph.input_paths, strict=True))
    inputs = {value for value in graph.inputs if graph.values[value].size > 1}

    def of(node: Node) -> str:
        known = [value for value in node.operands if value in origin]
        largest = max(known, key=lambda value: (value in inputs, graph.values[value].size), default=None)
        return "" if largest is None else origin[largest]

    for node in graph.nodes:
        module = node.path or of(node)
        origin.update(dict.fromkeys(node.results, module))
        yield module
