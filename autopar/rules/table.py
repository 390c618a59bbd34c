"""The table of sharding rules: primitive name -> function of a `NodeView` to its `Rule`.

In: `NodeView`. Out: `Rule`. A new primitive is one entry in one of the sibling files. A primitive
without an entry gets `None` from `rule_for`: the planner then runs it replicated by
`unknown_rule`, prices it as such, and names it in the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir.graph import Graph
from autopar.rules.contraction import CONTRACTION
from autopar.rules.control_flow import BORDERS, PINNED
from autopar.rules.convolution import CONVOLUTION
from autopar.rules.elementwise import ELEMENTWISE
from autopar.rules.factors import Rule
from autopar.rules.indexing import INDEXING
from autopar.rules.linear_algebra import LINEAR_ALGEBRA
from autopar.rules.node_view import NodeView, RuleFunction, counted, of_each_node
from autopar.rules.pooling import POOLING
from autopar.rules.reduction import REDUCTION
from autopar.rules.shape import SHAPE
from autopar.rules.user_rules import called, needs_local, registered_rule

#: Every primitive that can be split. Read-only.
RULES: Mapping[str, RuleFunction] = MappingProxyType(
    ELEMENTWISE | CONTRACTION | CONVOLUTION | POOLING | REDUCTION | SHAPE | INDEXING | LINEAR_ALGEBRA | BORDERS | PINNED
)


def rule_for(view: NodeView) -> Rule | None:
    """The rule of one node: the table's, else one that the user registered, else None."""
    function = RULES.get(view.primitive)
    return registered_rule(view) if function is None else function(view)


def unknown_rule(view: NodeView) -> Rule:
    """A rule by which nothing may be split. It is priced, on every device, at what could be counted of it, else at one
    operation per element of its largest tensor: nothing costs zero because it is unknown."""
    flops, inside = counted(view)
    return Rule(
        factors=(),
        operands=tuple(((),) * len(shape) for shape in view.operand_shapes),
        results=tuple(((),) * len(shape) for shape in view.result_shapes),
        flops_per_point=flops,
        matrix_flops_per_point=inside,
    )


def lacks_rule(view: NodeView) -> bool:
    """Whether a node has no rule, or none that can be used."""
    return rule_for(view) is None or needs_local(view)


def rules_of(graph: Graph) -> tuple[tuple[Rule, ...], Counter[str]]:
    """A rule per node, and the primitives that have none, or none that can be used, with how often they are used."""
    unknown: Counter[str] = Counter()
    known = of_each_node(graph, _rule_and_lack)
    for node, (_, lacking) in zip(graph.nodes, known, strict=True):
        if lacking:
            unknown[lacking] += not node.effect
    return tuple(rule for rule, _ in known), unknown


def _rule_and_lack(view: NodeView) -> tuple[Rule, str]:
    """A node's rule, and what it is called where that is none that splits it."""
    rule = rule_for(view)
    return rule or unknown_rule(view), called(view) if rule is None or needs_local(view) else ""
