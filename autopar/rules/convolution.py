"""The rule of convolutions: `n h w ci, kh kw ci co -> n h w co`, forward and both gradients alike.

In: `NodeView`. Out: `CONVOLUTION`, part of the table. Spatial dims need replication for now: to
split them takes a halo exchange. Their loops are counted in the operations per point instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.rules.factors import Name, Rule, build_rule
from autopar.rules.registry import NodeView, RuleFunction


def conv_general_dilated(view: NodeView) -> Rule:
    """Batch and output channels pass through, input channels are summed.

    With groups, channels are made of a major factor `g` (which group) and a minor one (which
    channel of the group): feature groups are `n (g ci), (g co) ci -> n (g co)`, and batch groups,
    which the gradient of the former by its kernel has, `(g n) ., (g co) . -> n (g co)`. What batch groups
    sum over (the batch) needs replication: split over one axis of a mesh with several, XLA's partitioner
    counts it once for each device along the others (seen on jax 0.12.0.1; `test_rules_forced.py`).
    """
    params = view.params
    numbers = params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers["lhs_spec"], numbers["rhs_spec"], numbers["out_spec"]
    rhs_shape, out_shape = view.operand_shapes[1], view.result_shapes[0]
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    groups = max(feature_groups, batch_groups)
    sizes: dict[Name, int] = {
        "g": groups,
        "n": out_shape[out_spec[0]],
        "co": rhs_shape[rhs_spec[0]] // groups,
        "ci": rhs_shape[rhs_spec[1]],
    }
    flops = 2.0 * _spatial_points(view, lhs_spec[2:], rhs_spec[2:], out_spec[2:])
    lhs_batch, lhs_channels, rhs_out, rhs_in = ("n",), ("g", "ci"), ("g", "co"), ("ci",)
    if batch_groups > 1:
        lhs_batch, lhs_channels, rhs_in = ("g", "n"), (), ()
        flops *= sizes.pop("ci")
    elif feature_groups > 1 and sizes["ci"] > 1:
        # XLA splits groups of one input channel (depthwise), but gathers the operands of any other, the batch too.
        lhs_batch = lhs_channels = rhs_out = rhs_in = ()
        flops *= math.prod(sizes.values())
        sizes = {}
    return build_rule(
        [_dims(lhs_spec, lhs_batch, lhs_channels), _dims(rhs_spec, rhs_out, rhs_in)],
        [_dims(out_spec, ("n",) if lhs_batch else (), rhs_out)],
        view.operand_shapes,
        view.result_shapes,
        sizes=sizes,
        flops_per_point=flops,
    )


def _dims(spec: Sequence[int], first: tuple[Name, ...], second: tuple[Name, ...]) -> list[tuple[Name, ...]]:
    """Names by dim, where `spec` lists the dims of two named things and then the spatial dims."""
    dims: list[tuple[Name, ...]] = [()] * len(spec)
    dims[spec[0]], dims[spec[1]] = first, second
    return dims


def _spatial_points(view: NodeView, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> float:
    """(output position, kernel position) pairs that meet an element of the input: padding and the
    holes of a dilated input, as in the gradient of a strided convolution, cost nothing on a GPU."""
    params = view.params
    total = 1
    for i, (d, k, o) in enumerate(zip(lhs, rhs, out, strict=True)):
        total *= _meeting_pairs(
            view.operand_shapes[0][d],
            view.operand_shapes[1][k],
            view.result_shapes[0][o],
            params["window_strides"][i],
            params["padding"][i][0],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
    return float(max(1, total))


def _meeting_pairs(
    size: int, kernel: int, out: int, stride: int, padding: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Along one dim: pairs (o, k) where `o * stride + k * rhs_dilation - padding` is an element.

    >>> _meeting_pairs(8, 3, 8, 1, 1, 1, 1)
    22
    """
    period = lhs_dilation // math.gcd(lhs_dilation, stride)  # hits along o come every so many
    last = (size - 1) * lhs_dilation
    total = 0
    for k in range(kernel):
        shift = k * rhs_dilation - padding
        begin = max(0, -(shift // stride))  # first o at or after the input's start
        end = min(out - 1, (last - shift) // stride)
        first = next((o for o in range(begin, begin + period) if (o * stride + shift) % lhs_dilation == 0), end + 1)
        total += max(0, (end - first) // period + 1)
    return total


CONVOLUTION: dict[str, RuleFunction] = {"conv_general_dilated": conv_general_dilated}
