"""Sharding rules of kernels: Pallas kernels by their grids, cuDNN attention by batch and heads.

In: a node whose parameter `loops` has the loops that devices can share (`frontend.kernel_loops`).
Out: its rule. Each device runs the kernel on its part, as a manual region: to XLA a kernel is opaque.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.rules.factors import ContextLoop, Rule, build_rule
from autopar.rules.node_view import NodeView, counted, matrix_efficiency
from autopar.rules.traits import Traits

#: The kernels whose loops are known, if devices can share them. Read-only.
KERNEL_TRAITS: Mapping[str, Traits] = {
    "pallas_call": Traits(library=True, independent=True, opaque=True),
    "dot_product_attention_fwd_wrapper": Traits(library=True, independent=True, partitioned=True),
    "dot_product_attention_bwd_wrapper": Traits(library=True, independent=True, partitioned=True),
}


def kernel_rule(view: NodeView) -> Rule | None:
    """The rule of a kernel; None if devices can share none of its loops. Its counted work is spread over the loops."""
    loops = view.params.get("loops")
    if loops is None:
        return None
    sizes = loops["sizes"]
    names = [name for name, size in sizes.items() if size > 1]
    points = math.prod(sizes.values())
    flops, inside = counted(view)
    rule = build_rule(
        loops["operands"],
        loops["results"],
        view.operand_shapes,
        view.result_shapes,
        sizes=sizes,
        flops_per_point=flops / points,
        matrix_flops_per_point=tuple((dtype, each / points) for dtype, each in inside),
        matrix_efficiency=matrix_efficiency(view.params),
        manual=loops["shared"],
        sums=loops["sums"],
    )
    context = loops.get("context")
    if context is None:
        return rule
    tokens = names.index(context["loop"])
    loop = ContextLoop(tokens, sizes[context["loop"]], context["is_causal"], context["is_backward"])
    return replace(rule, context=loop)
