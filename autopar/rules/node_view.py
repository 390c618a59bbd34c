"""Define the interface of a sharding rule: a function from a `NodeView` to a `Rule`.

In: a node of the graph. Out: `NodeView`, `RuleFunction`. The families of rules import this module; `table` merges their
tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autopar.ir.graph import Graph, Node
from autopar.rules.factors import Rule, build_rule, by_position


@dataclass(frozen=True, slots=True)
class NodeView:
    """All that a rule may depend on: the shapes and parameters of one node. A literal operand has shape ()."""

    primitive: str
    params: Mapping[str, Any]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(node: Node, graph: Graph) -> NodeView:
        return NodeView(
            node.primitive,
            node.params,
            tuple(() if v is None else graph.values[v].shape for v in node.operands),
            tuple(graph.values[v].shape for v in node.results),
        )


def rule_by_position(view: NodeView, whole: Collection[int] = (), **more: Any) -> Rule:
    """A rule in which all tensors share their dims by position, except the `whole` dims, which need replication.

    Args:
        more: further arguments of `build_rule`.
    """
    operands = [by_position(shape, whole) for shape in view.operand_shapes]
    results = [by_position(shape, whole) for shape in view.result_shapes]
    return build_rule(operands, results, view.operand_shapes, view.result_shapes, **more)


_T = TypeVar("_T")


def of_each_node(graph: Graph, of: Callable[[NodeView], _T]) -> list[_T]:
    """Apply a function to each node. Nodes with equal views share one call, because the layers of a model repeat."""
    known: dict[tuple[object, ...], _T] = {}
    found: list[_T] = []
    for node in graph.nodes:
        view = NodeView.of(node, graph)
        key = (view.primitive, view.operand_shapes, view.result_shapes, repr(view.params))
        if key not in known:
            known[key] = of(view)
        found.append(known[key])
    return found


def counted(view: NodeView) -> tuple[float, tuple[tuple[str, float], ...]]:
    """A node's operations outside matrix units, and on matrix units by dtype: the counted ones, else one per element of
    its largest tensor."""
    shapes = (*view.operand_shapes, *view.result_shapes)
    return view.params.get("work") or (float(max(map(math.prod, shapes), default=1)), ())


def matrix_efficiency(params: Mapping[str, Any]) -> float:
    """The share of a large matmul's rate that the counted operations of a kernel with these parameters reach."""
    return params.get("efficiency", 1.0)


RuleFunction = Callable[[NodeView], Rule]
