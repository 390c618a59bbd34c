"""Branches of a model: where its forward pass forks and joins.

In: a step's flow. Out: of each unit of the forward pass, its layer, such that branches are layers of their own. Between
two places where one large value alone passes, units belong to a branch if all that they read of this stretch does; what
reads several branches joins them. Layers are numbered so that none reads a later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.flow import Flow


def branch_layers(flow: Flow, *, least_share: float = 0.02) -> list[int]:
    """The layer of each unit of the forward pass.

    Args:
        least_share: of the forward pass's FLOPs, what the second largest branch of a fork must have for its branches to
            be layers of their own.
    """
    total = sum(flow.flops(flow.units[i]) for i in flow.forward)
    layers: list[int] = []
    layer = 0
    for start, stop in _stretches(flow):
        labels = _labels(flow, flow.forward[start:stop])
        work: dict[int, float] = {}
        for i, label in zip(flow.forward[start:stop], labels, strict=True):
            if label is not None:
                work[label] = work.get(label, 0.0) + flow.flops(flow.units[i])
        heavy = sorted(label for label, flops in work.items() if flops >= least_share * total)
        if len(heavy) < 2:
            layers += [layer] * (stop - start)
            continue
        first = layer + 1 if layers else layer
        number = {label: first + n for n, label in enumerate(heavy)}
        light = {label: number[heavy[0]] for label in work if label not in number}
        layer = first + len(heavy)
        layers += [layer if label is None else (number | light)[label] for label in labels]
    return layers


def _stretches(flow: Flow) -> list[tuple[int, int]]:
    """Runs of the forward pass between which one large value passes."""
    at = {i: position for position, i in enumerate(flow.forward)}
    passing = [0] * (len(at) + 1)
    for i, position in at.items():
        for value in flow.units[i].results:
            last = max((at[r] for r in flow.readers.get(value, ()) if r in at), default=position)
            if flow.is_large(value) and last > position:
                passing[position] += 1
                passing[last] -= 1
    bounds, count = [0], 0
    for position in range(len(at) - 1):
        count += passing[position]
        if count <= 1:
            bounds.append(position + 1)
    return list(zip(bounds, [*bounds[1:], len(at)], strict=True))


def _labels(flow: Flow, units: Sequence[int]) -> list[int | None]:
    """Of each unit of a stretch, its branch; None of what several have led to."""
    label: dict[int, int | None] = {}
    for i in units:
        read = {label[m] for v in flow.units[i].operands if (m := flow.maker.get(v)) is not None and m in label}
        label[i] = i if not read else next(iter(read)) if len(read) == 1 else None
    return [label[i] for i in units]
