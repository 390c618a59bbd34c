"""Branches of a model side by side: submeshes in parts, each with branches of its own.

In: a `PartitionProblem`, and the edges between its layers, which are numbered in topological order. Out: the same
problem with more shapes: a submesh split into equal parts. On such a one a run of layers is cut into segments; what is
not connected within a segment, its branches, is spread over the parts; and what a branch makes away from the first part
is sent there. So fork, branches and join are segments of an Inception module, and a stage may be many modules long. A
segment takes as long as its slowest part, the forward and the backward pass each for itself:

    sum over segments of  max over parts of (sum of its branches' forward_s + transfers)  +  the same backward

Segments and the parts of branches are chosen to make that least, exactly, for up to ten branches of a segment. The
partition of the new problem is never worse than that of the old one, whose shapes it has too. Bytes are those of the
part with most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.pipeline.partition.cluster import Submesh, SubmeshShape
from autopar.pipeline.partition.problem import Growth, PartitionProblem, Stage, StageCost

_MOST_BRANCHES = 10  # of a segment; more are joined, the smallest first
Segment = tuple[tuple[int, ...], ...]  # layers of each part


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Stages that fork and join, as programs are made of them.

    Args:
        stage_of: of each layer, its stage, of those that follow; none reads one with a higher number.
        place_of: of each of these, the stage of the partition and the part of its submesh that it stands on.
    """

    stage_of: tuple[int, ...]
    place_of: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Branches:
    """The layers as a graph.

    Args:
        problem: with layers as a chain.
        edges: pairs of layers, the lower one first.
        sent_s: seconds to send what a layer makes from part to part, and its gradient back, for one microbatch: the
            layer, the shape of a part, whether the parts share a host.
        most_parts: of a submesh.
    """

    problem: PartitionProblem
    edges: Sequence[tuple[int, int]]
    sent_s: Callable[[int, SubmeshShape, bool], float]
    most_parts: int = 4
    _costs: dict[tuple[int, int, SubmeshShape], StageCost | None] = field(default_factory=dict)
    _segments: dict[tuple[int, int, SubmeshShape], tuple[float, Segment] | None] = field(default_factory=dict)
    _ends: dict[tuple[int, SubmeshShape], list[tuple[float, int, Segment] | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(0 <= u < v < self.problem.num_layers for u, v in self.edges), "not in topological order"

    def widened(self) -> PartitionProblem:
        """The problem with submeshes in parts."""
        problem = self.problem
        shapes = problem.all_shapes
        split = [
            replace(shape, parts=parts)
            for shape in shapes
            for parts in range(2, self.most_parts + 1)
            if _part(replace(shape, parts=parts)) is not None
        ]
        keys = (
            None
            if problem.layer_keys is None
            else [(key, *self._around(i)) for i, key in enumerate(problem.layer_keys)]
        )
        return replace(
            problem,
            shapes=(*shapes, *split),
            cost=self.cost,
            bound=self._bound if problem.growth is Growth.SUPERADDITIVE or problem.bound is not None else None,
            layer_keys=keys,
        )

    def _bound(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        """An optimistic price. Parts share the work of single layers at best, and that of runs is no less if prices add
        up; on a whole submesh, a single layer's price is known."""
        inner, nothing = self.problem.bound, StageCost(forward_s=0.0)
        part = _part(shape)
        if shape.parts == 1 or part is None:
            if inner is not None:
                return inner(first, last, shape)
            return (self._cost(first, last, shape) if first == last else None) or nothing
        if self.problem.growth is not Growth.SUPERADDITIVE:
            return nothing
        known = [self._bound(layer, layer, part) for layer in range(first, last + 1)]
        return StageCost(
            forward_s=sum(cost.forward_s for cost in known) / shape.parts,
            backward_s=sum(cost.backward_s for cost in known) / shape.parts,
            weight_s=sum(cost.weight_s for cost in known) / shape.parts,
            update_s=sum(cost.update_s for cost in known) / shape.parts,
        )

    def _around(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How far from a layer those are that it reads, and those that read it."""
        read = tuple(sorted(layer - u for u, v in self.edges if v == layer))
        return read, tuple(sorted(v - layer for u, v in self.edges if u == layer))

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        """The price of a run of layers, on parts if the shape has them."""
        if shape.parts == 1:
            return self._cost(first, last, shape)
        cut = self._cut(first, last, shape)
        return None if cut is None else self._stage_cost(cut, shape)

    def segments(self, stage: Stage) -> tuple[Segment, ...]:
        """What each part of a stage's submesh does, segment after segment; the first part is first."""
        layers = tuple(range(stage.first, stage.last + 1))
        if stage.submesh.shape.parts == 1:
            return ((layers,),)
        return self._cut(stage.first, stage.last, stage.submesh.shape) or ()

    def costs_of(self, layers: Sequence[int], shape: SubmeshShape) -> list[StageCost]:
        """The prices of layers, in order, on a submesh in one part: of each run of those that follow one another."""
        return [cost for first, last in _runs(layers) if (cost := self._cost(first, last, shape)) is not None]

    def laid_out(self, stages: Sequence[Stage]) -> LaidOut:
        """What each part of a submesh does in a segment as a stage of its own, together with what it alone does before
        and after."""
        stage_of: dict[int, int] = {}
        place_of: list[tuple[int, int]] = []
        for number, stage in enumerate(stages):
            alone: int | None = None  # the part that has had all of the last segment
            for segment in self.segments(stage):
                busy = [part for part, layers in enumerate(segment) if layers]
                for part in busy:
                    if busy != [part] or alone != part:
                        place_of.append((number, part))
                    stage_of.update(dict.fromkeys(segment[part], len(place_of) - 1))
                alone = busy[0] if len(busy) == 1 else None
        return LaidOut(tuple(stage_of[layer] for layer in range(self.problem.num_layers)), tuple(place_of))

    def _cut(self, first: int, last: int, shape: SubmeshShape) -> tuple[Segment, ...] | None:
        """The quickest segments: a dynamic programme over where they end."""
        best = self._ends.setdefault((first, shape), [None])  # by the number of layers; of each its last segment
        for end in range(first + len(best) - 1, last + 1):
            best.append(None)
            for begin in range(first, end + 1):
                before = best[begin - first]
                found = self._segment(begin, end, shape) if begin == first or before is not None else None
                if found is None:
                    continue
                total = found[0] + (before[0] if before is not None else 0.0)
                now = best[end - first + 1]
                if now is None or total < now[0]:
                    best[end - first + 1] = (total, begin, found[1])
        cut: list[Segment] = []
        end = last + 1
        while end > first:
            step = best[end - first]
            if step is None:
                return None
            cut.append(step[2])
            end = step[1]
        return tuple(reversed(cut))

    def _segment(self, first: int, last: int, shape: SubmeshShape) -> tuple[float, Segment] | None:
        """The quickest way to spread a segment's branches over the parts, and its seconds."""
        key = first, last, shape
        if key not in self._segments:
            self._segments[key] = self._spread(first, last, shape)
        return self._segments[key]

    def _spread(self, first: int, last: int, shape: SubmeshShape) -> tuple[float, Segment] | None:
        part = _part(shape)
        assert part is not None
        loads: list[tuple[tuple[int, ...], _Load]] = []
        for branch in self._components(first, last):
            costs = [self._cost(i, j, part) for i, j in _runs(branch)]
            if any(cost is None for cost in costs):
                return None
            known = [cost for cost in costs if cost is not None]
            loads.append((branch, _load(known, self._sent(branch, part, shape.num_hosts == 1))))
        loads.sort(key=lambda item: -(item[1].forward_s + item[1].backward_s))
        while len(loads) > _MOST_BRANCHES:
            (one, a), (other, b) = loads.pop(), loads.pop()
            loads.append((tuple(sorted((*one, *other))), a.plus(b)))
        search = _Spread([load for _, load in loads], shape.parts)
        search.visit(0, (_Load(),) * shape.parts, 1)
        parts: list[list[int]] = [[] for _ in range(shape.parts)]
        for (branch, _), number in zip(loads, search.best, strict=True):
            parts[number].extend(branch)
        return search.seconds, tuple(tuple(sorted(layers)) for layers in parts)

    def _components(self, first: int, last: int) -> list[tuple[int, ...]]:
        """What is connected within a segment."""
        root = {layer: layer for layer in range(first, last + 1)}

        def find(layer: int) -> int:
            while root[layer] != layer:
                root[layer] = root[root[layer]]
                layer = root[layer]
            return layer

        for u, v in self.edges:
            if first <= u and v <= last:
                root[find(v)] = find(u)
        members: dict[int, list[int]] = {}
        for layer in range(first, last + 1):
            members.setdefault(find(layer), []).append(layer)
        return [tuple(layers) for layers in members.values()]

    def _sent(self, branch: tuple[int, ...], part: SubmeshShape, same_host: bool) -> float:
        """Seconds of what comes in and goes out where a branch is away from the first part; each value once."""
        inside = set(branch)
        crossing = {u for u, v in self.edges if (u in inside) != (v in inside)}
        return sum(self.sent_s(layer, part, same_host) for layer in sorted(crossing))

    def _stage_cost(self, cut: tuple[Segment, ...], shape: SubmeshShape) -> StageCost:
        part = _part(shape)
        assert part is not None
        forward_s = backward_s = weight_s = 0.0
        every: list[list[StageCost]] = [[] for _ in range(shape.parts)]
        for segment in cut:
            loads: list[_Load] = []
            for number, layers in enumerate(segment):
                load = _Load()
                for branch in self._branches_of(layers, segment):
                    costs = self.costs_of(branch, part)
                    sent = self._sent(branch, part, shape.num_hosts == 1) if number else 0.0
                    load = load.plus(_load(costs, 0.0)).away(sent)
                    every[number].extend(costs)
                loads.append(load)
            forward_s += max(load.forward_s for load in loads)
            backward_s += max(load.backward_s - load.weight_s for load in loads)
            weight_s += max(load.weight_s for load in loads)
        return StageCost(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=weight_s,
            update_s=max(sum(cost.update_s for cost in costs) for costs in every),
            state_bytes=max(sum(cost.state_bytes for cost in costs) for costs in every),
            flight_bytes=max(sum(cost.flight_bytes for cost in costs) for costs in every),
            working_bytes=max((cost.working_bytes for costs in every for cost in costs), default=0.0),
        )

    def _branches_of(self, layers: tuple[int, ...], segment: Segment) -> list[tuple[int, ...]]:
        """The branches that one part has of a segment."""
        everything = [layer for part in segment for layer in part]
        mine = set(layers)
        return [branch for branch in self._components(min(everything), max(everything)) if mine >= set(branch)]

    def _cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        key = first, last, shape
        if key not in self._costs:
            self._costs[key] = self.problem.cost(first, last, shape)
        return self._costs[key]


@dataclass(frozen=True, slots=True)
class _Load:
    """Seconds of a part, or a branch; the backward pass whole. `sent_s`: of a branch that is away, in both together."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    sent_s: float = 0.0

    def plus(self, other: _Load) -> _Load:
        """Both, one after the other."""
        return _Load(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.weight_s + other.weight_s,
            self.sent_s + other.sent_s,
        )

    def away(self, sent_s: float) -> _Load:
        """With transfers, one half in each pass."""
        return replace(self, forward_s=self.forward_s + sent_s / 2, backward_s=self.backward_s + sent_s / 2)


def _load(costs: Sequence[StageCost], sent_s: float) -> _Load:
    return _Load(
        sum(cost.forward_s for cost in costs),
        sum(cost.backward_s + cost.weight_s for cost in costs),
        sum(cost.weight_s for cost in costs),
        sent_s,
    )


class _Spread:
    """The quickest assignment of branches to parts, by looking at all that could be."""

    def __init__(self, branches: Sequence[_Load], num_parts: int) -> None:
        self.best: tuple[int, ...] = ()
        self.seconds = float("inf")
        self._branches, self._num_parts = branches, num_parts
        self._taken: list[int] = []

    def visit(self, number: int, parts: tuple[_Load, ...], used: int) -> None:
        """Assign the branches from `number` on; parts from `used` on are empty, and alike."""
        seconds = max(part.forward_s for part in parts) + max(part.backward_s for part in parts)
        if seconds >= self.seconds:
            return
        if number == len(self._branches):
            self.best, self.seconds = tuple(self._taken), seconds
            return
        branch = self._branches[number]
        for place in range(min(used + 1, self._num_parts)):
            load = parts[place].plus(branch)
            load = load.away(branch.sent_s) if place else load
            self._taken.append(place)
            self.visit(number + 1, (*parts[:place], load, *parts[place + 1 :]), max(used, place + 1))
            self._taken.pop()


def _part(shape: SubmeshShape) -> SubmeshShape | None:
    """One of the parts of a shape; None where it cannot be split so."""
    if shape.num_hosts == 1 and shape.devices_per_host % shape.parts == 0:
        return replace(shape, devices_per_host=shape.devices_per_host // shape.parts, parts=1)
    if shape.num_hosts > 1 and shape.num_hosts % shape.parts == 0:
        return replace(shape, num_hosts=shape.num_hosts // shape.parts, parts=1)
    return None


def on_part(submesh: Submesh, number: int) -> Submesh:
    """Where a part of a submesh stands; itself, where it has but one."""
    part = _part(submesh.shape)
    assert part is not None, submesh
    host = submesh.first_host + number * part.num_hosts if submesh.shape.num_hosts > 1 else submesh.first_host
    return Submesh(part, submesh.first_device + number * part.num_devices, host)


def _runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of the layers that follow one another."""
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and found[-1][1] == layer - 1:
            found[-1] = (found[-1][0], layer)
        else:
            found.append((layer, layer))
    return found
