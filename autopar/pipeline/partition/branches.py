"""Run parallel branches of a model on separate parts of a submesh.

In: a `PartitionProblem`, and the edges between its layers, which are in topological order.
Out: the same problem with additional shapes: submeshes split into equal parts. On such a shape, a run of layers is cut
into segments. The connected components of a segment are its branches; each is assigned to a part. A branch on another
part than the first receives its inputs from there and sends its outputs back. So an Inception module is three segments
(fork, branches, join), and a stage may contain many modules. A segment takes as long as its slowest part, in each pass:

    sum over segments of  max over parts of (sum of its branches' forward_s + transfers)  +  the same backward

Segments and assignments minimize this time, exactly for up to ten branches per segment. The new problem contains all
shapes of the old one, so its optimum is no worse. Memory is that of the fullest part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.pipeline.partition.cluster import Submesh, SubmeshShape
from autopar.pipeline.partition.problem import Growth, PartitionProblem, Stage, StageCost

_MOST_BRANCHES = 10  # per segment; of more, the smallest are merged
Segment = tuple[tuple[int, ...], ...]  # the layers of each part


@dataclass(frozen=True, slots=True)
class ForkedStages:
    """Stages that fork and join, from which programs are made.

    Args:
        stage_of: the stage of each layer; a stage reads only from stages with lower numbers.
        place_of: for each of these stages, the partition's stage and the part of its submesh.
    """

    stage_of: tuple[int, ...]
    place_of: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Branches:
    """The layers as a graph.

    Args:
        problem: the problem with the layers as a chain.
        edges: pairs of layers, the lower one first.
        sent_s: seconds to send a layer's result between parts and its gradient back, for one microbatch. Arguments: the
            layer, the shape of a part, whether the parts share a host.
        most_parts: the largest number of parts of a submesh.
        num_stages: the exact number of stages that each split submesh runs; None for any.
    """

    problem: PartitionProblem
    edges: Sequence[tuple[int, int]]
    sent_s: Callable[[int, SubmeshShape, bool], float]
    most_parts: int = 4
    num_stages: int | None = None
    _costs: dict[tuple[int, int, SubmeshShape], StageCost | None] = field(default_factory=dict)
    _segments: dict[tuple[int, int, SubmeshShape], tuple[float, Segment] | None] = field(default_factory=dict)
    _ends: dict[tuple[int, SubmeshShape], list[dict[_State, _Step]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(0 <= u < v < self.problem.num_layers for u, v in self.edges), "not in topological order"

    def with_split_submeshes(
        self,
        shapes: Sequence[SubmeshShape] | None = None,
        may_use: Callable[[int], bool] = lambda num_devices: True,
    ) -> PartitionProblem:
        """The problem with additional shapes for split submeshes.

        Args:
            shapes: the shapes to split; by default those of the problem.
            may_use: whether a part may have this number of devices.
        """
        problem = self.problem
        split = [
            replace(shape, parts=parts)
            for shape in shapes or problem.all_shapes
            for parts in range(2, self.most_parts + 1)
            if (part := _part(replace(shape, parts=parts))) is not None and may_use(part.num_devices)
        ]
        keys = (
            None
            if problem.layer_keys is None
            else [(key, *self._around(i)) for i, key in enumerate(problem.layer_keys)]
        )
        return replace(
            problem,
            shapes=(*problem.all_shapes, *split),
            cost=self.cost,
            bound=self._bound if problem.growth is Growth.SUPERADDITIVE or problem.bound is not None else None,
            layer_keys=keys,
        )

    def _bound(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        """A lower bound of the cost. Parts share the work of a run at best, so the problem's bound of all devices holds for
        them too. Without one, the work of a run is no less than that of its layers if costs are superadditive, and on an
        unsplit submesh the cost of a single layer is exact."""
        inner, nothing = self.problem.bound, StageCost(forward_s=0.0)
        if inner is not None:
            return inner(first, last, replace(shape, parts=1))
        part = _part(shape)
        if shape.parts == 1 or part is None:
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
        """The distances from a layer to its producers and to its users."""
        read = tuple(sorted(layer - u for u, v in self.edges if v == layer))
        return read, tuple(sorted(v - layer for u, v in self.edges if u == layer))

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        """The cost of a run of layers, on parts if the shape is split."""
        if shape.parts == 1:
            return self._cost(first, last, shape)
        cut = self._cut(first, last, shape)
        return None if cut is None else self._stage_cost(cut, shape)

    def segments(self, stage: Stage) -> tuple[Segment, ...]:
        """The layers of each part of a stage's submesh, by segment; the first part comes first."""
        layers = tuple(range(stage.first, stage.last + 1))
        if stage.submesh.shape.parts == 1:
            return ((layers,),)
        return self._cut(stage.first, stage.last, stage.submesh.shape) or ()

    def costs_of(self, layers: Sequence[int], shape: SubmeshShape) -> list[StageCost]:
        """The costs of layers on an unsplit submesh: one for each maximal run of consecutive layers."""
        return [cost for first, last in _runs(layers) if (cost := self._cost(first, last, shape)) is not None]

    def forked_stages(self, stages: Sequence[Stage]) -> ForkedStages:
        """Make one stage for each part and segment; merge consecutive segments that use only one and the same part."""
        stage_of: dict[int, int] = {}
        place_of: list[tuple[int, int]] = []
        for number, stage in enumerate(stages):
            alone: int | None = None  # the only part that the last segment uses
            for segment in self.segments(stage):
                busy = [part for part, layers in enumerate(segment) if layers]
                for part in busy:
                    if busy != [part] or alone != part:
                        place_of.append((number, part))
                    stage_of.update(dict.fromkeys(segment[part], len(place_of) - 1))
                alone = busy[0] if len(busy) == 1 else None
        return ForkedStages(tuple(stage_of[layer] for layer in range(self.problem.num_layers)), tuple(place_of))

    def _cut(self, first: int, last: int, shape: SubmeshShape) -> tuple[Segment, ...] | None:
        """The fastest segments, with the exact number of stages if there is one: a dynamic program over their ends."""
        best = self._ends.setdefault((first, shape), [{_State(): _Step(0.0)}])  # by number of layers
        for end in range(first + len(best) - 1, last + 1):
            best.append({})
            for begin in range(first, end + 1):
                found = self._segment(begin, end, shape) if best[begin - first] else None
                if found is None:
                    continue
                seconds, segment = found
                for state, before in best[begin - first].items():
                    after, total = self._after(state, segment), before.seconds + seconds
                    known = best[-1].get(after)
                    if (self.num_stages or 0) >= after.num_stages and (known is None or total < known.seconds):
                        best[-1][after] = _Step(total, begin, state, segment)
        ends = {
            state: step for state, step in best[last - first + 1].items() if state.num_stages == (self.num_stages or 0)
        }
        if not ends:
            return None
        state, end = min(ends, key=lambda one: ends[one].seconds), last + 1
        cut: list[Segment] = []
        while end > first:
            step = best[end - first][state]
            cut.append(step.segment)
            state, end = step.state, step.begin
        return tuple(reversed(cut))

    def _after(self, state: _State, segment: Segment) -> _State:
        """The state after one more segment, as `forked_stages` makes stages of it; one state if any number is allowed."""
        if self.num_stages is None:
            return state
        busy = [part for part, layers in enumerate(segment) if layers]
        alone = busy[0] if len(busy) == 1 else None
        joins = alone is not None and alone == state.alone
        return _State(state.num_stages + len(busy) - joins, alone)

    def _segment(self, first: int, last: int, shape: SubmeshShape) -> tuple[float, Segment] | None:
        """The fastest assignment of a segment's branches to the parts, and its seconds."""
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
        """The connected components of a segment."""
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
        """Seconds of the inputs and outputs of a branch that is not on the first part; each value counts once."""
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
            kept_bytes=max(sum(cost.kept_bytes for cost in costs) for costs in every),
            passed_bytes=max(sum(cost.passed_bytes for cost in costs) for costs in every),
        )

    def _branches_of(self, layers: tuple[int, ...], segment: Segment) -> list[tuple[int, ...]]:
        """The branches of a segment that one part runs."""
        layers_of_segment = [layer for part in segment for layer in part]
        mine = set(layers)
        return [
            branch for branch in self._components(min(layers_of_segment), max(layers_of_segment)) if mine >= set(branch)
        ]

    def _cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        key = first, last, shape
        if key not in self._costs:
            self._costs[key] = self.problem.cost(first, last, shape)
        return self._costs[key]


@dataclass(frozen=True, slots=True)
class _State:
    """What the segments so far have made.

    Args:
        num_stages: the number of their stages; 0 if any number is allowed.
        alone: the only part that the last segment uses; None if it uses several.
    """

    num_stages: int = 0
    alone: int | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """The fastest segments up to an end: their seconds, the first layer of the last one, and the state before it."""

    seconds: float
    begin: int = 0
    state: _State = _State()
    segment: Segment = ()


@dataclass(frozen=True, slots=True)
class _Load:
    """The seconds of a part or a branch. `backward_s` includes `weight_s`. `sent_s` is the time of a branch's transfers
    in both passes."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    sent_s: float = 0.0

    def plus(self, other: _Load) -> _Load:
        """The sum of both."""
        return _Load(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.weight_s + other.weight_s,
            self.sent_s + other.sent_s,
        )

    def away(self, sent_s: float) -> _Load:
        """The load with transfers, half in each pass."""
        return replace(self, forward_s=self.forward_s + sent_s / 2, backward_s=self.backward_s + sent_s / 2)


def _load(costs: Sequence[StageCost], sent_s: float) -> _Load:
    return _Load(
        sum(cost.forward_s for cost in costs),
        sum(cost.backward_s + cost.weight_s for cost in costs),
        sum(cost.weight_s for cost in costs),
        sent_s,
    )


class _Spread:
    """Finds the fastest assignment of branches to parts by exhaustive search."""

    def __init__(self, branches: Sequence[_Load], num_parts: int) -> None:
        self.best: tuple[int, ...] = ()
        self.seconds = float("inf")
        self._branches, self._num_parts = branches, num_parts
        self._taken: list[int] = []

    def visit(self, number: int, parts: tuple[_Load, ...], used: int) -> None:
        """Assign the branches from `number` on. Parts from `used` on are empty and interchangeable."""
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
    """One part of a split shape; None if the shape cannot be split."""
    if shape.num_hosts == 1 and shape.devices_per_host % shape.parts == 0:
        return replace(shape, devices_per_host=shape.devices_per_host // shape.parts, parts=1)
    if shape.num_hosts > 1 and shape.num_hosts % shape.parts == 0:
        return replace(shape, num_hosts=shape.num_hosts // shape.parts, parts=1)
    return None


def on_part(submesh: Submesh, number: int) -> Submesh:
    """The submesh of a part; the submesh itself if it has one part."""
    part = _part(submesh.shape)
    assert part is not None, submesh
    host = submesh.first_host + number * part.num_hosts if submesh.shape.num_hosts > 1 else submesh.first_host
    return Submesh(part, submesh.first_device + number * part.num_devices, host)


def _runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last layer of each run of consecutive layers."""
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and found[-1][1] == layer - 1:
            found[-1] = (found[-1][0], layer)
        else:
            found.append((layer, layer))
    return found
