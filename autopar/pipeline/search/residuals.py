"""Choose the residuals of a stage: what the forward pass stashes, and what the backward pass rematerializes.

In: a planned stage's program, and the price of a stashed byte.
Out: `Crossing`. The two passes are separate programs, so every residual is written to memory and read again, even one
that a single program would keep inside a fusion. Rematerialization happens in the backward pass only. For each layer a
minimum cut chooses the residuals with the least sum of seconds and priced bytes. Values that layers read from each
other are never rematerialized, so that one layer at a time is in memory. Each layer may rematerialize values that
belong to no layer, such as a mask, for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.pipeline.cut.pieces import Layout
from autopar.planner.candidate import Candidate
from autopar.planner.remat.candidates import common_path
from autopar.planner.remat.costs import costs_of
from autopar.planner.remat.min_cut import States, Step, cheapest
from autopar.plans.records import Rematerialization, RematSegment
from autopar.rules.grouping import SMALL_SIZE
from autopar.transforms.remat.sites import sites_of


@dataclass(frozen=True, slots=True)
class Crossing:
    """The residuals of one microbatch on one device.

    Args:
        recomputed: the rematerialized segments of the backward pass.
        read: values that the backward pass reads from the forward pass or from the stage's inputs.
        num_bytes: the bytes of those that the stage produces.
        written_s: seconds to write residuals that would stay inside fusions in one program; reading takes as long.
        recompute_s: seconds of rematerialization.
        recompute_bytes: the largest number of bytes that are rematerialized together.
        passing: the values that the forward pass stashes.
        read_by: value -> the layers whose backward pass reads it, also to rematerialize others.
        recomputed_s: rematerialized node -> seconds.
    """

    recomputed: tuple[Rematerialization, ...]
    read: frozenset[int]
    num_bytes: float
    written_s: float
    recompute_s: float
    recompute_bytes: float
    passing: frozenset[int]
    read_by: Mapping[int, set[int]]
    recomputed_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class _Segment:
    """The forward computation of one layer, or of several that are rematerialized together.

    Args:
        nodes: nodes in order, including those that belong to no layer.
        needed: the nodes whose results the backward pass reads, and the first node that does.
        fixed: nodes whose results other layers read; they are not rematerialized.
    """

    nodes: tuple[int, ...]
    needed: dict[int, int]
    fixed: frozenset[int]


class Crossings:
    """The possible residuals of a planned stage.

    Args:
        layout: the layout of the planned trace.
        phases: the phase of each of its equations.
        separate: whether the two passes are separate programs. In one program, fusions keep values in registers.
        together: for each layer, a number that layers rematerialized together share; by default each is alone.
    """

    def __init__(
        self,
        candidate: Candidate,
        layout: Layout,
        phases: Mapping[int, str],
        *,
        separate: bool = True,
        together: Sequence[int] | None = None,
    ) -> None:
        self.separate, self.together, self.in_slices = separate, together, layout.num_slices > 1
        self.graph, self.profile = candidate.formulation.graph, candidate.formulation.profile
        equations = layout.trace.equations
        forward = [unit for unit in layout.body if phases[unit.start] == "forward"]
        self.produced_forward = {v for unit in forward for v in unit.results}
        #: By value that the backward pass reads directly: its first unit that reads it, by layer.
        self.read: dict[int, dict[int | None, int]] = {}
        known = self.produced_forward | set(layout.takes_inside.values())
        for unit in layout.body:
            if phases[unit.start] != "forward":
                for value in known.intersection(unit.operands):
                    self.read.setdefault(value, {}).setdefault(equations[unit.start].layer, unit.start)
        sites = sites_of(layout.trace) if self.read else ()
        start = sites[0].start if sites else len(equations)
        self.repeat = sites[0].repeat if sites else 1.0
        self.costs = costs_of(candidate.formulation, candidate.solution.choices, candidate.parts.device, start, {})
        forward_nodes = [n for n in (sites[0].forward if sites else ()) if phases[n] == "forward"]
        self.layer_of = {n: equations[n].layer for n in forward_nodes}
        self.part_of = {n: self._part(layer) for n, layer in self.layer_of.items()}
        #: Values that leave the stage or the iteration in the forward pass, so they are computed there.
        self.leaving = {v for n in range(*layout.loop.exit) for v in equations[n].operands if isinstance(v, int)}
        self.segments = self._segments()

    def without_recompute(self) -> Crossing:
        """The residuals without rematerialization."""
        return self._crossing([])

    def at(self, price: float) -> Crossing:
        """The residuals with the least sum of time and priced bytes.

        Args:
            price: the price of a stashed byte, in units of the time to write and read it.
        """
        if self.in_slices:  # what a slice's backward pass would compute again, earlier ones' may need before it
            return self.without_recompute()
        assert price > 0, price
        per_byte = 2 * price / self.profile.memory_bytes_per_s
        found = []
        for segment in self.segments:
            steps = self._steps(segment, price)
            found.append((segment, steps, cheapest(steps, list(segment.needed), per_byte)))
        return self._crossing(found)

    # -- helpers -----------------------------------------------------------------------------

    def _segments(self) -> list[_Segment]:
        """The forward computation of each layer, or of layers that are rematerialized together."""
        graph = self.graph
        segments: list[_Segment] = []
        members: dict[int, set[int]] = defaultdict(set)
        for n, part in self.part_of.items():
            if part is not None:
                members[part].add(n)
        for part in sorted(members):
            own = members[part]
            waiting = list(own)
            while waiting:  # add nodes that belong to no layer
                for value in graph.nodes[waiting.pop()].operands:
                    producer = -1 if value is None else graph.producers.get(value, -1)
                    if producer not in own and self.part_of.get(producer, -1) is None:
                        own.add(producer)
                        waiting.append(producer)
            needed: dict[int, int] = {}
            for n in sorted(own):
                for value in graph.nodes[n].results:
                    users = self.read.get(value, {})
                    is_own = self.part_of[n] is not None
                    at = [place for of, place in users.items() if is_own or self._part(of) == part]
                    if at:
                        needed[n] = min([*at, needed.get(n, len(graph.nodes))])
            if needed:
                segments.append(_Segment(tuple(sorted(own)), needed, self._fixed(part, own)))
        return segments

    def _part(self, layer: int | None) -> int | None:
        return layer if layer is None or self.together is None else self.together[layer]

    def _fixed(self, part: int, nodes: Iterable[int]) -> frozenset[int]:
        """The nodes of a segment whose results others read in the forward pass."""
        elsewhere = set(self.leaving)
        for n, of in self.part_of.items():
            if of not in (part, None):
                elsewhere.update(self._large(v for v in self.graph.nodes[n].operands if v is not None))
        own = (n for n in nodes if self.part_of[n] == part)
        return frozenset(n for n in own if not elsewhere.isdisjoint(self.graph.nodes[n].results))

    def _steps(self, segment: _Segment, price: float) -> dict[int, Step]:
        costs, producers, own = self.costs, self.graph.producers, set(segment.nodes)
        steps: dict[int, Step] = {}
        for n in segment.nodes:
            node = self.graph.nodes[n]
            seconds = sum(costs.seconds.get(v, 0.0) for v in node.results)
            steps[n] = Step(
                self._stash_cost(node.results, price),
                float("inf") if n in segment.fixed else seconds,
                tuple(sorted(own & {producers.get(v, -1) for v in node.operands if v is not None} - {n})),
            )
        return steps

    def _crossing(self, found: Sequence[tuple[_Segment, dict[int, Step], States]]) -> Crossing:
        graph, costs = self.graph, self.costs
        recomputed: list[Rematerialization] = []
        renewed: set[int] = set()
        read: set[int] = set()
        seconds = most = 0.0
        read_by = {v: {layer for layer in users if layer is not None} for v, users in self.read.items()}
        recomputed_s: dict[int, float] = {}
        for segment, steps, states in found:
            nodes = tuple(sorted(states.again))
            at = [segment.needed[n] for n in nodes if n in segment.needed]
            if not at:
                continue
            own = {v for n in nodes for v in graph.nodes[n].results}
            taken = {v for n in nodes for v in graph.nodes[n].operands if v is not None} - own
            stashed_bytes = self.num_bytes(own & set(self.read)) - self.num_bytes(
                (taken & self.produced_forward) - set(self.read)
            )
            recomputed_s |= {n: recomputed_s.get(n, 0.0) + steps[n].seconds for n in nodes}
            for n in nodes:
                layer = self.layer_of[n]
                for v in graph.nodes[n].operands:
                    if v is not None and layer is not None:
                        read_by.setdefault(v, set()).add(layer)
            recompute_s = sum(steps[n].seconds for n in nodes)
            remat = RematSegment(nodes=nodes, before=min(at), prompt=False)
            path = common_path([graph.nodes[n].path for n in nodes])
            recomputed.append(
                Rematerialization(segment=remat, path=path, saved_bytes=stashed_bytes, time_s=self.repeat * recompute_s)
            )
            renewed |= own
            read |= taken
            seconds += recompute_s
            most = max(most, self.num_bytes(v for v in own if v in costs.stored))
        read |= set(self.read) - renewed
        passing = read & self.produced_forward
        if not self.separate:
            passing &= costs.stored
        return Crossing(
            tuple(recomputed),
            frozenset(read),
            self.num_bytes(passing),
            self.fused_bytes(passing) / self.profile.memory_bytes_per_s,
            seconds,
            most,
            frozenset(passing),
            read_by,
            recomputed_s,
        )

    def _stash_cost(self, values: Iterable[int], price: float) -> float:
        """The cost of stashing values, in bytes at a price."""
        if self.separate:
            return self.num_bytes(values) + self.fused_bytes(values) / price
        large = self._large(values)
        seen = [v for v in large if v in self.costs.stored]
        return float("inf") if large and not seen else self.num_bytes(seen)

    def _large(self, values: Iterable[int]) -> list[int]:
        return [v for v in values if self.graph.values[v].size > SMALL_SIZE]

    def num_bytes(self, values: Iterable[int]) -> float:
        """Bytes of the large ones among these values."""
        return sum(self.costs.num_bytes[v] for v in self._large(values))

    def fused_bytes(self, values: Iterable[int]) -> float:
        """Bytes of values that exist only inside fusions in a single program."""
        return sum(self.costs.num_bytes[v] for v in self._large(values) if v not in self.costs.stored)
