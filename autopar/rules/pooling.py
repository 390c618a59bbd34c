"""Rules of reductions over windows, and of the gradient of max pooling.

In: `NodeView`. Out: `POOLING`, part of the table. Dims without a window are free. A dim with a window may be split: the
node then runs as a manual region, in which each device receives halo slices from its neighbours (`halo_window`). If the
reduction is a user's function, such a dim needs replication.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial

from autopar.rules.factors import Name, Rule, build_rule, by_position
from autopar.rules.halo_window import Window
from autopar.rules.node_view import NodeView, RuleFunction, rule_by_position
from autopar.rules.traits import Traits, with_traits


def _pool(view: NodeView) -> Rule:
    """Pooling by an operation that XLA knows."""
    windows = {(0, d): _pooling_window(view, d) for d in _windowed_dims(view)}
    return _windowed(view, {place: window for place, window in windows.items() if window.can_be_split})


def _unpool(view: NodeView) -> Rule:
    """The gradient of max pooling, with operands (gradient, input). A device computes its part of the result from all
    windows that overlap it. So it also reads the other elements of these windows."""
    windows: dict[tuple[int, int], Window] = {}
    for d in _windowed_dims(view):
        gradient, operand = unpooling_windows(view, d)
        if gradient.can_be_split and operand.can_be_split:
            windows |= {(0, d): gradient, (1, d): operand}
    return _windowed(view, windows)


def unpooling_windows(view: NodeView, d: int) -> tuple[Window, Window]:
    """How the loop over the result reads the gradient, and how it reads the input. It reads the input in whole windows,
    from the first one that overlaps an iteration's element."""
    params = view.params
    (places, size), (low, _) = (shape[d] for shape in view.operand_shapes), params["padding"][d]
    taps, stride = params["window_dimensions"][d], params["window_strides"][d]
    gradient = Window(places, size, 1, taps, taps - 1 - low, stride)
    first, last = -((taps - 1 - low) // stride), (low - 1) // stride
    return gradient, Window(size, size, 1, stride * (last - first) + taps + 1, low - stride * first)


def _whole(view: NodeView, windowed: int) -> Rule:
    """The windowed dims of the first `windowed` operands and of all results need replication; any further operand is a
    scalar initial value."""
    whole = _windowed_dims(view)
    terms = [by_position(s, whole) if i < windowed else [()] * len(s) for i, s in enumerate(view.operand_shapes)]
    return build_rule(
        terms,
        [by_position(shape, whole) for shape in view.result_shapes],
        view.operand_shapes,
        view.result_shapes,
        flops_per_point=_flops(view, whole),
    )


def _reduce_window(view: NodeView) -> Rule:
    return _whole(view, len(view.operand_shapes) // 2)


def _windowed(view: NodeView, windows: Mapping[tuple[int, int], Window]) -> Rule:
    """A rule in which dims correspond by position; a windowed dim needs replication unless `windows` has an entry for
    it."""
    sizes: dict[Name, int] = {d: window.count for (_, d), window in windows.items()}
    windowed = _windowed_dims(view)
    whole = [d for d in windowed if d not in sizes]
    return rule_by_position(
        view,
        whole,
        sizes=sizes,
        flops_per_point=_flops(view, windowed) / math.prod(sizes.values()),
        windows=windows,
        manual=tuple(sizes),
    )


def _pooling_window(view: NodeView, d: int) -> Window:
    params = view.params
    ones = (1,) * (d + 1)
    size, stride = params["window_dimensions"][d], params["window_strides"][d]
    extent = (params.get("window_dilation") or ones)[d] * (size - 1) + 1
    dilation = (params.get("base_dilation") or ones)[d]
    low, count = params["padding"][d][0], view.result_shapes[0][d]
    return Window(view.operand_shapes[0][d], count, stride, extent, low, dilation, slack=stride - 1)


def _windowed_dims(view: NodeView) -> list[int]:
    params = view.params
    window, strides, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    dilation = params.get("base_dilation") or (1,) * len(window)
    free = [
        size == 1 and stride == 1 and tuple(pad) == (0, 0) and base == 1
        for size, stride, pad, base in zip(window, strides, padding, dilation, strict=True)
    ]
    return [d for d, is_free in enumerate(free) if not is_free]


def _flops(view: NodeView, dims: Collection[int]) -> float:
    """Operations for all window positions along these dims."""
    positions = math.prod(min(view.operand_shapes[0][d], view.result_shapes[0][d]) for d in dims)
    return float(positions * math.prod(view.params["window_dimensions"]))


POOLING: dict[str, RuleFunction] = {
    **{f"reduce_window_{kind}": _pool for kind in ("sum", "max", "min")},
    "reduce_window": _reduce_window,
    "select_and_scatter_add": _unpool,
    **{name: partial(_whole, windowed=2) for name in ("select_and_gather_add", "select_and_scatter")},
}

POOLING_TRAITS = with_traits(
    POOLING,
    {
        **dict.fromkeys((name for name in POOLING if name.startswith("reduce_window")), Traits(reduces="dims")),
        "select_and_scatter_add": Traits(in_place="window"),
    },
)
