"""What passes from the forward to the backward pass of a stage, and what the backward pass computes again instead.

In: a planned stage's program, and what a byte that is held is worth. Out: `Crossing`. The two passes are programs of
their own. So whatever passes is written to memory and read again, even what one program would have kept inside its
kernels; and what is computed again of what passes is computed in the backward pass alone. Of each layer a minimum cut
chooses what passes, at the least sum of seconds and of bytes at their price. What layers read of each other is never
computed again, so that one layer is in memory at a time; what belongs to none (a mask, say) each may make for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.pipeline.cut.pieces import Layout
from autopar.planner.candidate import Candidate
from autopar.planner.remat.candidates import common_path
from autopar.planner.remat.costs import numbers_of
from autopar.planner.remat.min_cut import States, Step, cheapest
from autopar.plans.records import Again, Recomputation
from autopar.rules.grouping import SMALL_SIZE
from autopar.transforms.remat.sites import sites_of


@dataclass(frozen=True, slots=True)
class Crossing:
    """What passes between the two passes of one microbatch, on one device.

    Args:
        recomputed: what the backward pass computes again.
        read: values of the forward pass, and of what comes to it, that the backward pass reads then.
        num_bytes: of those that the stage makes.
        written_s: what it takes to write those that would have stayed inside kernels; to read them takes as long.
        again_s: what is computed again.
        again_bytes: the most that is computed again together.
    """

    recomputed: tuple[Recomputation, ...]
    read: frozenset[int]
    num_bytes: float
    written_s: float
    again_s: float
    again_bytes: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """What one layer computes forward.

    Args:
        nodes: in order, with what belongs to no layer.
        needed: of these, the ones that the backward pass reads, and before which node.
        fixed: those that make what others read; they are not computed again.
    """

    nodes: tuple[int, ...]
    needed: dict[int, int]
    fixed: frozenset[int]


class Crossings:
    """Of one planned stage.

    Args:
        layout: of the trace that was planned. phases: of its equations.
        apart: whether the two passes are programs of their own. In one program, what is inside kernels stays there.
    """

    def __init__(self, made: Candidate, layout: Layout, phases: Mapping[int, str], *, apart: bool = True) -> None:
        self.apart = apart
        self.graph, self.profile = made.formulation.graph, made.formulation.profile
        equations = layout.trace.equations
        forward = [unit for unit in layout.body if phases[unit.start] == "forward"]
        self.made_forward = {v for unit in forward for v in unit.results}
        #: By value that the backward pass reads as it is, its first unit that does, by layer.
        self.read: dict[int, dict[int | None, int]] = {}
        known = self.made_forward | set(layout.takes_inside.values())
        for unit in layout.body:
            if phases[unit.start] != "forward":
                for value in known.intersection(unit.operands):
                    self.read.setdefault(value, {}).setdefault(equations[unit.start].layer, unit.start)
        sites = sites_of(layout.trace) if self.read else ()
        start = sites[0].start if sites else len(equations)
        self.repeat = sites[0].repeat if sites else 1.0
        self.numbers = numbers_of(made.formulation, made.solution.choices, made.parts.device, start, {})
        self.layer_of = {n: equations[n].layer for n in (sites[0].forward if sites else ()) if phases[n] == "forward"}
        #: What leaves the stage, or the trip, in the forward pass: it is made there.
        self.leaving = {v for n in range(*layout.loop.exit) for v in equations[n].operands if isinstance(v, int)}
        self.segments = self._segments()

    def as_it_is(self) -> Crossing:
        """All that is read passes."""
        return self._crossing([])

    def at(self, price: float) -> Crossing:
        """The least sum.

        Args:
            price: of a byte that is held, in units of what it takes to write one and to read it.
        """
        assert price > 0, price
        per_byte = 2 * price / self.profile.hbm_bytes_per_s
        found = []
        for segment in self.segments:
            steps = self._steps(segment, price)
            found.append((segment, steps, cheapest(steps, list(segment.needed), per_byte)))
        return self._crossing(found)

    # -- inside ------------------------------------------------------------------------------

    def _segments(self) -> list[_Segment]:
        """What each layer computes."""
        graph = self.graph
        segments: list[_Segment] = []
        for layer in sorted({layer for layer in self.layer_of.values() if layer is not None}):
            own = {n for n, of in self.layer_of.items() if of == layer}
            waiting = list(own)
            while waiting:  # what belongs to no layer
                for value in graph.nodes[waiting.pop()].operands:
                    producer = -1 if value is None else graph.producers.get(value, -1)
                    if producer not in own and self.layer_of.get(producer, -1) is None:
                        own.add(producer)
                        waiting.append(producer)
            needed: dict[int, int] = {}
            for n in sorted(own):
                for value in graph.nodes[n].results:
                    readers = self.read.get(value, {})
                    at = [place for of, place in readers.items() if self.layer_of[n] is not None or of == layer]
                    if at:
                        needed[n] = min([*at, needed.get(n, len(graph.nodes))])
            if needed:
                segments.append(_Segment(tuple(sorted(own)), needed, self._fixed(layer, own)))
        return segments

    def _fixed(self, layer: int, nodes: Iterable[int]) -> frozenset[int]:
        """Of a layer's nodes, those that make what others than itself read in the forward pass."""
        elsewhere = set(self.leaving)
        for n, of in self.layer_of.items():
            if of not in (layer, None):
                elsewhere.update(self._large(v for v in self.graph.nodes[n].operands if v is not None))
        own = (n for n in nodes if self.layer_of[n] == layer)
        return frozenset(n for n in own if not elsewhere.isdisjoint(self.graph.nodes[n].results))

    def _steps(self, segment: _Segment, price: float) -> dict[int, Step]:
        numbers, producers, own = self.numbers, self.graph.producers, set(segment.nodes)
        steps: dict[int, Step] = {}
        for n in segment.nodes:
            node = self.graph.nodes[n]
            seconds = sum(numbers.seconds.get(v, 0.0) for v in node.results)
            steps[n] = Step(
                self._kept(node.results, price),
                float("inf") if n in segment.fixed else seconds,
                tuple(sorted(own & {producers.get(v, -1) for v in node.operands if v is not None} - {n})),
            )
        return steps

    def _crossing(self, found: Sequence[tuple[_Segment, dict[int, Step], States]]) -> Crossing:
        graph, numbers = self.graph, self.numbers
        recomputed: list[Recomputation] = []
        renewed: set[int] = set()
        read: set[int] = set()
        seconds = most = 0.0
        for segment, steps, states in found:
            nodes = tuple(sorted(states.again))
            at = [segment.needed[n] for n in nodes if n in segment.needed]
            if not at:
                continue
            own = {v for n in nodes for v in graph.nodes[n].results}
            taken = {v for n in nodes for v in graph.nodes[n].operands if v is not None} - own
            held = self._num_bytes(own & set(self.read)) - self._num_bytes((taken & self.made_forward) - set(self.read))
            again_s = sum(steps[n].seconds for n in nodes)
            again = Again(nodes=nodes, before=min(at), prompt=False)
            path = common_path([graph.nodes[n].path for n in nodes])
            recomputed.append(Recomputation(again=again, path=path, saved_bytes=held, time_s=self.repeat * again_s))
            renewed |= own
            read |= taken
            seconds += again_s
            most = max(most, self._num_bytes(v for v in own if v in numbers.stored))
        read |= set(self.read) - renewed
        passing = read & self.made_forward
        if not self.apart:
            passing &= numbers.stored
        return Crossing(
            tuple(recomputed),
            frozenset(read),
            self._num_bytes(passing),
            self._unseen(passing) / self.profile.hbm_bytes_per_s,
            seconds,
            most,
        )

    def _kept(self, values: Iterable[int], price: float) -> float:
        """What it takes to keep values, in bytes at a price."""
        if self.apart:
            return self._num_bytes(values) + self._unseen(values) / price
        large = self._large(values)
        seen = [v for v in large if v in self.numbers.stored]
        return float("inf") if large and not seen else self._num_bytes(seen)

    def _large(self, values: Iterable[int]) -> list[int]:
        return [v for v in values if self.graph.values[v].size > SMALL_SIZE]

    def _num_bytes(self, values: Iterable[int]) -> float:
        return sum(self.numbers.num_bytes[v] for v in self._large(values))

    def _unseen(self, values: Iterable[int]) -> float:
        """Bytes of values that are inside kernels only, as one program."""
        return sum(self.numbers.num_bytes[v] for v in self._large(values) if v not in self.numbers.stored)
