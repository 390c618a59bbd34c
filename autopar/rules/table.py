"""The table of sharding rules: primitive name -> function from a `NodeView` to its `Rule`.

In: `NodeView`. Out: `Rule`. A new primitive is one entry in one of the sibling files. For a primitive without an entry
`rule_for` returns `None`. The planner then runs it replicated by `unknown_rule`, prices it as such, and names it in the
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir.graph import Graph
from autopar.rules.contraction import CONTRACTION, CONTRACTION_TRAITS
from autopar.rules.control_flow import BORDERS, CONTROL_FLOW_TRAITS, PINNED
from autopar.rules.convolution import CONVOLUTION, CONVOLUTION_TRAITS
from autopar.rules.elementwise import ELEMENTWISE, ELEMENTWISE_TRAITS
from autopar.rules.factors import Rule
from autopar.rules.indexing import INDEXING, INDEXING_TRAITS
from autopar.rules.kernels import KERNEL_TRAITS, kernel_rule
from autopar.rules.linear_algebra import LINEAR_ALGEBRA, LINEAR_ALGEBRA_TRAITS
from autopar.rules.node_view import NodeView, RuleFunction, counted, matrix_efficiency, of_each_node
from autopar.rules.pooling import POOLING, POOLING_TRAITS
from autopar.rules.reduction import REDUCTION, REDUCTION_TRAITS
from autopar.rules.shape import SHAPE, SHAPE_TRAITS
from autopar.rules.traits import Traits
from autopar.rules.user_rules import called, needs_local, registered_rule, registered_traits

#: Every primitive that can be split. Read-only.
RULES: Mapping[str, RuleFunction] = MappingProxyType(
    ELEMENTWISE | CONTRACTION | CONVOLUTION | POOLING | REDUCTION | SHAPE | INDEXING | LINEAR_ALGEBRA | BORDERS | PINNED
)

#: Primitives without a rule.
_RULELESS: Mapping[str, Traits] = {
    **dict.fromkeys(("expand_dims", "copy_p"), Traits(view=True, linear="one", one_to_one=True)),
    "ragged_dot": Traits(contraction=True, library=True),
    **dict.fromkeys(("custom_call", "ffi_call"), Traits(library=True, opaque=True)),
    **dict.fromkeys(("call_hi_primitive", "pure_callback"), Traits(opaque=True)),
}
#: The traits of every primitive that has a rule, and of some that have none. Read-only.
TRAITS: Mapping[str, Traits] = MappingProxyType(
    {
        **_RULELESS,
        **KERNEL_TRAITS,
        **ELEMENTWISE_TRAITS,
        **CONTRACTION_TRAITS,
        **CONVOLUTION_TRAITS,
        **POOLING_TRAITS,
        **REDUCTION_TRAITS,
        **SHAPE_TRAITS,
        **INDEXING_TRAITS,
        **LINEAR_ALGEBRA_TRAITS,
        **CONTROL_FLOW_TRAITS,
    }
)


def traits_of(primitive: str) -> Traits:
    """The traits of a primitive: the table's, else the user's, else the defaults, which promise nothing."""
    return TRAITS.get(primitive) or registered_traits(primitive)


def rule_for(view: NodeView) -> Rule | None:
    """The rule of one node: the table's, else the user's, else that of a kernel's loops, else None. A user's rule that lacks
    a local function gives way to a kernel's loops."""
    function = RULES.get(view.primitive)
    if function is not None:
        return function(view)
    own = registered_rule(view)
    return own if own is not None and not needs_local(view) else kernel_rule(view) or own


def unknown_rule(view: NodeView) -> Rule:
    """A rule by which nothing may be split. Each device is priced for the node's counted operations, else for one
    operation per element of its largest tensor, because no unknown primitive may cost zero."""
    flops, inside = counted(view)
    return Rule(
        factors=(),
        operands=tuple(((),) * len(shape) for shape in view.operand_shapes),
        results=tuple(((),) * len(shape) for shape in view.result_shapes),
        flops_per_point=flops,
        matrix_flops_per_point=inside,
        matrix_efficiency=matrix_efficiency(view.params),
    )


def without_rule(view: NodeView) -> str:
    """The name of a node's primitive if it has no usable rule, else an empty string."""
    known = rule_for(view) is not None and (not needs_local(view) or kernel_rule(view) is not None)
    return "" if known else called(view)


def rules_of(graph: Graph) -> tuple[tuple[Rule, ...], Counter[str]]:
    """One rule per node, and the primitives without a usable rule, with the number of their uses."""
    unknown: Counter[str] = Counter()
    known = of_each_node(graph, lambda view: (rule_for(view) or unknown_rule(view), without_rule(view)))
    for node, (_, name) in zip(graph.nodes, known, strict=True):
        if name:
            unknown[name] += not node.effect
    return tuple(rule for rule, _ in known), unknown
