"""The rule of matrix products: `b i k, b k j -> b i j` with any number of each kind of dim.

In: `NodeView`. Out: `CONTRACTION`, part of the table.
"""

from __future__ import annotations

from autopar.rules.factors import Name, Rule, build_rule
from autopar.rules.registry import NodeView, RuleFunction


def dot_general(view: NodeView) -> Rule:
    """Batch dims, then the left's free dims, then the right's; contracting dims are summed."""
    (left_contracting, right_contracting), (left_batch, right_batch) = view.params["dimension_numbers"]
    left_shape, right_shape = view.operand_shapes
    left: list[tuple[Name, ...]] = [(f"i{d}",) for d in range(len(left_shape))]
    right: list[tuple[Name, ...]] = [(f"j{d}",) for d in range(len(right_shape))]
    for d, e in zip(left_batch, right_batch, strict=True):
        left[d] = right[e] = (f"b{d}",)
    for d, e in zip(left_contracting, right_contracting, strict=True):
        left[d] = right[e] = (f"k{d}",)
    result = [left[d] for d in left_batch]
    result += [names for names in left if str(names[0]).startswith("i")]
    result += [names for names in right if str(names[0]).startswith("j")]
    return build_rule([left, right], [result], view.operand_shapes, view.result_shapes, flops_per_point=2.0)


CONTRACTION: dict[str, RuleFunction] = {"dot_general": dot_general}
