"""Find the branches of a model: where its forward pass forks and joins.

In: a step's flow. Out: the layer of each unit of the forward pass; each branch is a layer of its own. The forward pass
is divided into stretches at the places where a single large value passes. Within a stretch, a unit belongs to a branch
if all its operands from this stretch do; a unit that reads several branches joins them. Layers are numbered so that
none reads a later one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.cut.exchanges import Passing, passing_of
from autopar.pipeline.cut.flow import Chain, Flow, chain_of
from autopar.pipeline.partition.cluster_layers import cheapest_cuts

#: Branches are searched if at least this share of the forward FLOPs can run concurrently with the rest.
_LEAST_CONCURRENT = 0.05
#: A value of at least this share of the largest value's bytes keeps branches from beginning or ending where it passes.
_LEAST_PASSING = 1e-3
#: A layer is cut into at most this many parts, times its share of the forward FLOPs.
_FINEST = 24


@dataclass(frozen=True, slots=True)
class ForkedLayers:
    """Layers that fork and join.

    Args:
        layer_of: layer of each unit of the forward pass. No layer reads one with a higher number.
        passing: values that pass between layers in the forward pass.
        keys: layers with equal keys are equal.
    """

    layer_of: tuple[int, ...]
    passing: tuple[Passing, ...]
    keys: tuple[int, ...]

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of layers; the second reads the first."""
        return tuple(sorted({(one.producer, reader) for one in self.passing for reader in one.readers}))

    @property
    def made_bytes(self) -> list[float]:
        """For each layer, bytes of its values that other layers read."""
        return [sum(one.num_bytes for one in self.passing if one.producer == layer) for layer in range(len(self.keys))]


def forked_layers(flow: Flow, chain: Chain) -> ForkedLayers | None:
    """The layers of a model with branches that are worth a search; None if it has none.

    Args:
        chain: the forward pass.
    """
    coarse = branch_layers(flow, chain)
    if max(coarse) == 0 or _concurrent_share(coarse, chain.flops, passing_of(flow, coarse)) < _LEAST_CONCURRENT:
        return None
    layer_of = _finer(flow, chain, coarse)
    passing = passing_of(flow, layer_of)
    return ForkedLayers(tuple(layer_of), passing, _keys(flow, chain, layer_of, passing))


def _concurrent_share(layer_of: Sequence[int], flops: Sequence[float], passing: Sequence[Passing]) -> float:
    """The share of the FLOPs that is not on the critical path through the layers."""
    work = np.bincount(layer_of, weights=flops)
    longest = np.zeros(len(work))
    for layer in range(len(work)):
        before = [longest[one.producer] for one in passing if layer in one.readers]
        longest[layer] = work[layer] + max(before, default=0.0)
    return 1 - float(longest.max() / work.sum()) if work.any() else 0.0


def _finer(flow: Flow, chain: Chain, layer_of: Sequence[int]) -> list[int]:
    """Cut layers with many FLOPs further, each into a chain."""
    layers, flops = np.asarray(layer_of), np.asarray(chain.flops)
    finer, number = np.zeros(len(layers), int), 0
    for layer in range(int(layers.max()) + 1):
        (mine,) = np.nonzero(layers == layer)
        most = min(
            round(_FINEST * float(flops[mine].sum() / flops.sum())),
            int((flops[mine] > flops.sum() / (2 * _FINEST)).sum()),  # cheap units get no layer of their own
        )
        own = chain_of(flow, [chain.units[position] for position in mine])
        cuts = [0.0, *own.cut_bytes]
        starts = cheapest_cuts(own.flops, cuts, most).starts
        begun = np.zeros(len(mine), int)
        begun[list(starts[1:])] = 1
        finer[mine] = number + np.cumsum(begun)
        number += len(starts)
    return finer.tolist()


def _keys(flow: Flow, chain: Chain, layer_of: Sequence[int], passing: Sequence[Passing]) -> tuple[int, ...]:
    """A key for each layer. Layers with equal keys have equal units, read and make equal bytes, and read equal bytes
    from the layer just before them."""
    signs: list[list[Hashable]] = [[] for _ in range(max(layer_of) + 1)]
    for i, flops, layer in zip(chain.units, chain.flops, layer_of, strict=True):
        unit = flow.units[i]
        names = tuple(equation.primitive for equation in flow.trace.equations[unit.start : unit.stop])
        shapes = tuple(flow.graph.values[value].shape for value in (*unit.operands, *unit.results))
        signs[layer].append((names, shapes, flops))
    for one in passing:
        signs[one.producer].append(("makes", one.num_bytes))
        for reader in one.readers:
            signs[reader].append(("reads", one.producer == reader - 1, one.num_bytes))
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(tuple(sign), len(numbers)) for sign in signs)


def branch_layers(flow: Flow, chain: Chain, *, least_share: float = 0.01) -> list[int]:
    """The layer of each unit of the forward pass.

    Args:
        chain: the forward pass.
        least_share: the branches of a fork become layers if the second largest has at least this share of the forward
            FLOPs.
    """
    least = least_share * sum(chain.flops)
    stretches = _stretches(flow)
    head = _until_all_has_begun(flow, stretches)
    if head > 1:
        whole = (0, stretches[head - 1][1])
        if len(_heavy(flow, chain, whole, least)[1]) > 1:
            stretches = [whole, *stretches[head:]]
    layers: list[int] = []
    layer = 0
    for start, stop in stretches:
        labels, heavy = _heavy(flow, chain, (start, stop), least)
        if len(heavy) < 2:
            layers += [layer] * (stop - start)
            continue
        first = layer + 1 if layers else layer
        number = {label: first + n for n, label in enumerate(heavy)}
        layer = first + len(heavy)
        layers += [layer if label is None else number.get(label, first) for label in labels]
    dense = {layer: number for number, layer in enumerate(sorted(set(layers)))}  # a number without units is dropped
    return [dense[layer] for layer in layers]


def _heavy(flow: Flow, chain: Chain, stretch: tuple[int, int], least: float) -> tuple[list[int | None], list[int]]:
    """The branch of each unit of a stretch, and the branches with at least `least` FLOPs."""
    labels = _labels(flow, chain.units[slice(*stretch)])
    work: dict[int, float] = {}
    for flops, label in zip(chain.flops[slice(*stretch)], labels, strict=True):
        if label is not None:
            work[label] = work.get(label, 0.0) + flops
    return labels, sorted(label for label, flops in work.items() if flops >= least)


def _until_all_has_begun(flow: Flow, stretches: Sequence[tuple[int, int]]) -> int:
    """Number of stretches up to the last unit that reads only data, such as the first unit of a second tower."""
    made = {value for i in flow.forward for value in flow.units[i].results}
    begins = [n for n, i in enumerate(flow.forward) if made.isdisjoint(flow.units[i].operands)]
    last = max(begins, default=0)
    return 1 + next((n for n, (start, stop) in enumerate(stretches) if start <= last < stop), 0)


def _stretches(flow: Flow) -> list[tuple[int, int]]:
    """Runs of the forward pass between places where at most one large value passes."""
    at = {i: position for position, i in enumerate(flow.forward)}
    passing = [0] * (len(at) + 1)
    sizes = {v: flow.num_bytes(iter((v,))) for i in flow.forward for v in flow.units[i].results}
    least = _LEAST_PASSING * max(sizes.values(), default=0.0)
    for i, position in at.items():
        for value in flow.units[i].results:
            last = max((at[r] for r in flow.readers.get(value, ()) if r in at), default=position)
            if sizes[value] > least and last > position:
                passing[position] += 1
                passing[last] -= 1
    bounds, count = [0], 0
    for position in range(len(at) - 1):
        count += passing[position]
        if count <= 1:
            bounds.append(position + 1)
    return list(zip(bounds, [*bounds[1:], len(at)], strict=True))


def _labels(flow: Flow, units: Sequence[int]) -> list[int | None]:
    """The branch of each unit of a stretch; None for units that depend on several branches."""
    label: dict[int, int | None] = {}
    for i in units:
        read = {label[m] for v in flow.units[i].operands if (m := flow.producer.get(v)) is not None and m in label}
        label[i] = i if not read else next(iter(read)) if len(read) == 1 else None
    return [label[i] for i in units]
