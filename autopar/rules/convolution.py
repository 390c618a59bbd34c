"""The sharding rule of convolutions: `n h w ci, kh kw ci co -> n h w co`, forward and both gradients.

In: `NodeView`. Out: `CONVOLUTION`, part of the table. A spatial dim is a loop over the results' positions. If the
kernel has more, as in the gradient with respect to a kernel, it is a loop over the kernel's positions, which are
summed. Either loop reads the input in windows (`halo_window`), so a device needs halo slices from its neighbours.

A split spatial dim runs as a manual region. XLA's partitioner exchanges halos too, but not for all strides. It also
sums the gradient of a kernel over the whole mesh, including axes that split nothing (seen on jax 0.12.0.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.rules.factors import Name, Rule, build_rule
from autopar.rules.halo_window import Window
from autopar.rules.node_view import NodeView, RuleFunction
from autopar.rules.traits import Traits, with_traits


def conv_general_dilated(view: NodeView) -> Rule:
    """Batch and output channels pass through, input channels are summed.

    With groups, channels have a major factor `g` (the group) and a minor one (the channel within the group). Feature
    groups are `n (g ci), (g co) ci -> n (g co)`. Batch groups, in the gradient of feature groups with respect to the
    kernel, are `(g n) k, (g co) k -> n (g co)`. XLA's partitioner splits feature groups of one input channel
    (depthwise). For all others it all-gathers the operands, including the batch. For batch groups it counts the sum
    once for each device along axes that split nothing.
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
    grouped = batch_groups > 1 or (feature_groups > 1 and sizes["ci"] > 1)
    lhs_channels = ("ci",) if batch_groups > 1 else ("g", "ci")
    lhs = _dims(lhs_spec, ("g", "n") if batch_groups > 1 else ("n",), lhs_channels)
    rhs = _dims(rhs_spec, ("g", "co"), ("ci",))
    out = _dims(out_spec, ("n",), ("g", "co"))
    windows: dict[tuple[int, int], Window] = {}
    spatial: list[Name] = []
    for i, (window, is_summed) in enumerate(spatial_windows(view)):
        if window.can_be_split:
            name = f"s{i}"
            spatial.append(name)
            sizes[name] = window.count
            windows[0, lhs_spec[2 + i]] = window
            lhs[lhs_spec[2 + i]] = (name,)
            if is_summed:
                rhs[rhs_spec[2 + i]] = (name,)
            else:
                out[out_spec[2 + i]] = (name,)
    points = _spatial_points(view, lhs_spec[2:], rhs_spec[2:], out_spec[2:])
    return build_rule(
        [lhs, rhs],
        [out],
        view.operand_shapes,
        view.result_shapes,
        sizes=sizes,
        flops_per_point=2.0 * points / math.prod(sizes[name] for name in spatial),
        windows=windows,
        manual=tuple(sizes) if grouped else tuple(spatial),
    )


def spatial_windows(view: NodeView) -> list[tuple[Window, bool]]:
    """For each spatial dim, how its loop reads the input, and whether that loop runs over the kernel."""
    params = view.params
    numbers = params["dimension_numbers"]
    found: list[tuple[Window, bool]] = []
    for i, (d, k, o) in enumerate(
        zip(*(numbers[spec][2:] for spec in ("lhs_spec", "rhs_spec", "out_spec")), strict=True)
    ):
        size, taps, places = view.operand_shapes[0][d], view.operand_shapes[1][k], view.result_shapes[0][o]
        by_place = params["window_strides"][i], params["rhs_dilation"][i] * (taps - 1) + 1
        by_tap = params["rhs_dilation"][i], params["window_strides"][i] * (places - 1) + 1
        is_summed = taps > places
        stride, extent = by_tap if is_summed else by_place
        count = taps if is_summed else places
        low, dilation = params["padding"][i][0], params["lhs_dilation"][i]
        window = Window(size, count, stride, extent, low, dilation, slack=params["window_strides"][i] - 1)
        found.append((window, is_summed))
    return found


def _dims(spec: Sequence[int], first: tuple[Name, ...], second: tuple[Name, ...]) -> list[tuple[Name, ...]]:
    """Names by dim; `spec` lists the dims of the two named loops first, then the spatial dims."""
    dims: list[tuple[Name, ...]] = [()] * len(spec)
    dims[spec[0]], dims[spec[1]] = first, second
    return dims


def _spatial_points(view: NodeView, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> float:
    """The number of (output position, kernel position) pairs that read an element of the input. Padding and the holes
    of a dilated input, as in the gradient of a strided convolution, cost nothing on a GPU."""
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
    """Along one dim: the number of pairs (o, k) where `o * stride + k * rhs_dilation - padding` is an element.

    >>> _meeting_pairs(8, 3, 8, 1, 1, 1, 1)
    22
    """
    period = lhs_dilation // math.gcd(lhs_dilation, stride)  # distance between two hits along o
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

CONVOLUTION_TRAITS = with_traits(
    CONVOLUTION,
    {"conv_general_dilated": Traits(contraction=True, library=True, linear="either", terms=True, independent=True)},
)
