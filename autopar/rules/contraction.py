"""The rules of matmuls: `b i k, b k j -> b i j` with any number of dims of each kind.

In: `NodeView`. Out: `CONTRACTION`, part of the table.
"""

from __future__ import annotations

import math

from autopar.ir.graph import Node
from autopar.rules.factors import Name, Rule, build_rule
from autopar.rules.node_view import NodeView, RuleFunction, rule_by_position
from autopar.rules.traits import Traits, with_traits


def dot_general(view: NodeView) -> Rule:
    """The result has the batch dims, the left operand's free dims, and the right operand's; contracting dims are
    summed."""
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


def ragged_dot_general(view: NodeView) -> Rule:
    """A matmul in groups of unequal size, such as the experts of a mixture: `m k, g k n, . -> m n`.

    The groups' ends are known only at run time. So the ragged dim and the group dim are split as manual regions: each
    device multiplies those of its rows that belong to its own groups.

    XLA multiplies every row by the matrix of every group and masks all products but one. The rule counts these
    operations.
    """
    numbers = view.params["ragged_dot_dimension_numbers"]
    (left_contracting, right_contracting), (left_batch, right_batch) = numbers["dot_dimension_numbers"]
    ragged, groups = numbers["lhs_ragged_dimensions"], numbers["rhs_group_dimensions"]
    left_shape, right_shape, group_shape = view.operand_shapes[:3]
    # Each row of a batch may have its own groups; if the batch dim itself is ragged, the groups have no effect.
    in_batch = bool(set(ragged) & set(left_batch))
    manual = len(group_shape) == 1 and not in_batch
    rows: tuple[Name, ...] = ("m",) if manual else ()
    experts: tuple[Name, ...] = ("g",) if manual else ()
    left: list[tuple[Name, ...]] = [rows if d in ragged else (f"i{d}",) for d in range(len(left_shape))]
    right: list[tuple[Name, ...]] = [experts if d in groups else (f"j{d}",) for d in range(len(right_shape))]
    for letter, pairs in (("b", (left_batch, right_batch)), ("k", (left_contracting, right_contracting))):
        for d, e in zip(*pairs, strict=True):
            left[d] = right[e] = rows if d in ragged else (f"{letter}{d}",)
    result = [left[d] for d in left_batch]
    result += [names for d, names in enumerate(left) if d not in (*left_batch, *left_contracting)]
    result += [names for e, names in enumerate(right) if e not in (*right_batch, *right_contracting, *groups)]
    # if a contracting dim is ragged, the group dim leads the result
    result = [experts] * (len(view.result_shapes[0]) - len(result)) + result
    rest: list[list[tuple[Name, ...]]] = [[()] * len(shape) for shape in (group_shape, *view.operand_shapes[3:])]
    summed = bool(set(ragged) & set(left_contracting))
    copied = [left, right] if summed else [left]  # XLA stores one masked copy per group
    whole = 1 if manual else math.prod(left_shape[d] for d in ragged) * (1 if in_batch else group_shape[-1])
    return build_rule(
        [left, right, *rest],
        [result],
        view.operand_shapes,
        view.result_shapes,
        flops_per_point=2.0 * whole,
        manual=("m", "g"),
        stored=[("g", *(name for names in term for name in names)) for term in copied] if manual else (),
    )


def _symmetric_product(view: NodeView) -> Rule:
    """`alpha a aᵀ + beta c`: both dims of the result run along the rows of `a`, so only the batch may be split. It is
    split as a manual region, because on GPUs it is a cuBLAS call, for which XLA's partitioner all-gathers the
    operands."""
    *batch, rows, columns = view.operand_shapes[0]
    whole = (len(batch), len(batch) + 1)
    return rule_by_position(view, whole, flops_per_point=float(rows * rows * columns), manual=range(len(batch)))


def _paged_attention(view: NodeView) -> Rule:
    """Rows, tokens and KV heads are independent problems. Pages need replication, because a row may use any of them.
    The node is split as a manual region, because XLA's partitioner would all-gather the pages for its loop or
    kernel."""
    _, size, kv_heads, dim = view.operand_shapes[1]
    heads = ("k", "g")  # query heads that share a KV head are adjacent
    queries, pages = [("r",), ("t",), heads, ()], [(), (), ("k",), ()]
    return build_rule(
        [queries, pages, pages, [("r",), ()], [("r",), ("t",)]],
        [queries],
        view.operand_shapes,
        view.result_shapes,
        sizes={"k": kv_heads, "g": view.operand_shapes[0][2] // kv_heads},
        flops_per_point=4.0 * view.operand_shapes[3][1] * size * dim,
        manual=("r", "t", "k", "g"),
    )


def is_matmul(node: Node) -> bool:
    """Whether a node is a matmul of two tensors."""
    return node.primitive == "dot_general" and None not in node.operands


CONTRACTION: dict[str, RuleFunction] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "symmetric_product": _symmetric_product,
    "paged_attention": _paged_attention,
}

CONTRACTION_TRAITS = with_traits(
    CONTRACTION,
    {
        "dot_general": Traits(contraction=True, library=True, linear="either", terms=True),
        "ragged_dot_general": Traits(contraction=True, library=True),
        "symmetric_product": Traits(independent=True),
        "paged_attention": Traits(library=True, independent=True),
    },
)
