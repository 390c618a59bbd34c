"""Count the model FLOPs of a step, for MFU.

In: a graph. Out: FLOPs by dtype.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from autopar.ir.graph import Graph
from autopar.rules.table import rules_of, traits_of


def model_flops(graph: Graph) -> Mapping[str, float]:
    """FLOPs of a step's matmuls and convolutions by dtype, including those inside kernels that can be counted.

    Args:
        graph: graph of the user's step, without rematerialization.
    """
    found: dict[str, float] = defaultdict(float)
    for node, rule in zip(graph.nodes, rules_of(graph)[0], strict=True):
        points = math.prod(factor.size for factor in rule.factors)
        for dtype, flops in rule.matrix_flops_per_point:
            found[dtype] += node.repeat * flops * points
        if traits_of(node.primitive).contraction:
            operand = next((value for value in node.operands if value is not None), node.results[0])
            found[graph.values[operand].dtype] += node.repeat * rule.flops_per_point * points
    return found
