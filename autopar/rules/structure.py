"""Rules of the pieces of loops and branches: what one tensor does at their border.

In: `NodeView`. Out: `STRUCTURE`, part of the table. A tensor is split alike on both sides of a border; the dim that
counts a loop's trips, of a stack that it takes from or adds to, stays whole: a trip needs one element of it.
"""

from __future__ import annotations

from autopar.rules.factors import Name, Rule, build_rule
from autopar.rules.registry import NodeView, RuleFunction


def _dims(shape: tuple[int, ...]) -> list[tuple[Name, ...]]:
    return [(d,) for d in range(len(shape))]


def _passes(view: NodeView) -> Rule:
    """The same on both sides, of each branch as of the one taken."""
    return build_rule(
        [_dims(shape) for shape in view.operand_shapes if shape],
        [_dims(shape) for shape in view.result_shapes],
        [shape for shape in view.operand_shapes if shape],
        view.result_shapes,
        pointwise=True,
        flops_per_point=0.0,
    )


def _takes_one(view: NodeView) -> Rule:
    """`. d… -> d…`, for each trip one element of the stack."""
    (stack,), (one,) = view.operand_shapes, view.result_shapes
    operands = [[(), *_dims(one)]]
    return build_rule(operands, [_dims(one)], [stack], [one], pointwise=True, flops_per_point=0.0)


def _adds_one(view: NodeView) -> Rule:
    """`d… -> . d…`, from each trip one element of the stack."""
    (one,), (stack,) = view.operand_shapes, view.result_shapes
    results = [[(), *_dims(stack[1:])]]
    return build_rule([_dims(one)], results, [one], [stack], pointwise=True, flops_per_point=0.0)


def _decides(view: NodeView) -> Rule:
    return build_rule([()], [], [()], [], flops_per_point=1.0)


STRUCTURE: dict[str, RuleFunction] = {
    **dict.fromkeys(("enter_const", "enter_carry", "enter_branch", "exit_carry", "exit_branch", "barrier"), _passes),
    "enter_slice": _takes_one,
    "exit_stack": _adds_one,
    **dict.fromkeys(("index", "predicate"), _decides),
}
