"""What a sharding rule is written against: a `NodeView` goes in, a `Rule` comes out.

In: a node of the graph. Out: `NodeView`, `RuleFunction`. The families of rules beside this file
import it, and `table` merges what they hold.
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
    """All a rule may look at: shapes and parameters of one node. A literal operand has shape ()."""

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
    """All tensors share their dims by position, except those that need replication.

    Args:
        more: of `build_rule`.
    """
    operands = [by_position(shape, whole) for shape in view.operand_shapes]
    results = [by_position(shape, whole) for shape in view.result_shapes]
    return build_rule(operands, results, view.operand_shapes, view.result_shapes, **more)


_T = TypeVar("_T")


def of_each_node(graph: Graph, of: Callable[[NodeView], _T]) -> list[_T]:
    """What a function makes of each node; asked once of those that are alike, for a program is layer after layer of the
    same."""
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
    """Operations of a whole node outside matrix units, and inside by dtype: as they were counted, else one for each element
    of its largest tensor."""
    shapes = (*view.operand_shapes, *view.result_shapes)
    return view.params.get("work") or (float(max(map(math.prod, shapes), default=1)), ())


RuleFunction = Callable[[NodeView], Rule]
