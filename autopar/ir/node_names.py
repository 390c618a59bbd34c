"""Give a graph's nodes and values names that stay stable as the model changes: `forward GPT/h_0/mlp dot_general #1`.

In: a graph. Out: for each value or use a name of phase, module, primitive and position among equal ones in the module;
and an order to list them in. An additional layer does not rename the nodes of other layers.
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
        """The name of a value, after its producer.

        Args:
            value: index of the value in the graph.
        """
        if value not in self._graph.producers:
            return self._given.get(value, "a constant")
        node = self._graph.producers[value]
        results = self._graph.nodes[node].results
        return self._node(node) + (f", result {results.index(value)}" if len(results) > 1 else "")

    def reading(self, node: int, operand: int) -> str:
        """The name of a node's operand; the node after the last stands for the outputs of the step."""
        if node == len(self._graph.nodes):
            return self._graph.output_paths[operand]
        return f"{self._node(node)}, operand {operand}"

    def order(self, value: int, node: int | None, operand: int | None) -> tuple[Any, ...]:
        """A sort key of values and uses: by module with natural numbering, then in the order of the step."""
        if node == len(self._graph.nodes):
            return 2, by_number(self._graph.output_paths[operand or 0])
        at = self._graph.producers.get(value) if node is None else node
        if at is None:
            return 0, by_number(self._given.get(value, ""))
        phase = get_args(Phase).index(self._graph.nodes[at].phase)
        return 1, by_number(self._modules[at]), phase, at, -1 if operand is None else operand

    def _node(self, n: int) -> str:
        node = self._graph.nodes[n]
        parts = filter(None, (node.phase, self._modules[n], node.primitive))
        return f"{' '.join(parts)} #{self._numbers[n]}"


def by_number(text: str) -> tuple[str | int, ...]:
    """A key that sorts `h_2` before `h_10`.

    >>> sorted(["h_10", "h_2"], key=by_number)
    ['h_2', 'h_10']
    """
    parts = re.split(r"(\d+)", text)
    return tuple(int(part) if n % 2 else part for n, part in enumerate(parts))


def _modules(graph: Graph) -> Iterator[str]:
    """Yield the module of each node. A node outside modules, as in an optimizer, belongs to the module of the array it
    works on: of its largest input, else of the producer of its largest operand."""
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
