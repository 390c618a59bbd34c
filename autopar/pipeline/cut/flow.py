"""What a step does, seen as a pipeline sees it: forward, backward, and around the loop over microbatches.

In: a trace, its graph, and what of it runs for each microbatch. Out: `Flow`: its units, which of them run forward and
which backward, and which belong to no layer because whoever reads them may make them: they depend on nothing but data
and small values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.frontend.trace import Trace
from autopar.ir.graph import Graph
from autopar.rules.grouping import SMALL_SIZE
from autopar.rules.table import traits_of
from autopar.transforms.microbatch.batch_dims import Places
from autopar.transforms.microbatch.classify import Split
from autopar.transforms.microbatch.units import Unit, backward_of, units_of

#: State of so few elements (a counter, a key, a learning rate) every layer may have of its own.
_FEW = 16
#: Work for each element it makes, up to which a unit is made by each layer that reads it: random bits take so much.
_CHEAP = 256.0


@dataclass(frozen=True)
class Flow:
    """The units of a step.

    Args:
        places: of the graph.
    """

    trace: Trace
    graph: Graph
    split: Split
    places: Places
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, trace: Trace, graph: Graph, split: Split, places: Places) -> Flow:
        """The flow of a step that has been classified."""
        return cls(trace, graph, split, places, tuple(_units(trace, graph)))

    @functools.cached_property
    def producer(self) -> dict[int, int]:
        """By value, the unit that makes it."""
        return {value: i for i, unit in enumerate(self.units) for value in unit.results}

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """By value, the units that read it, in order."""
        found: dict[int, list[int]] = {}
        for i, unit in enumerate(self.units):
            for value in unit.operands:
                found.setdefault(value, []).append(i)
        return found

    @functools.cached_property
    def inside(self) -> frozenset[int]:
        """The units that run for each microbatch."""
        return frozenset(i for i, unit in enumerate(self.units) if unit.start in self.split.inside)

    @functools.cached_property
    def backward(self) -> frozenset[int]:
        """Of these, those of the backward pass."""
        at = {unit.start: i for i, unit in enumerate(self.units)}
        inside = [self.units[i] for i in sorted(self.inside)]
        return frozenset(at[unit.start] for unit in backward_of(inside, self.trace.equations))

    @functools.cached_property
    def free_values(self) -> frozenset[int]:
        """What every layer may have of its own: data, constants, small values, and what is made of these cheaply."""
        graph = self.graph
        state = {graph.inputs[position] for position, _ in graph.carried}
        free = {v for v in graph.inputs if v not in state or graph.values[v].size <= _FEW}
        free.update(graph.constants)
        for unit in self.units:
            if all(v in free for v in unit.operands) and self._is_cheap(unit):
                free.update(unit.results)
        return frozenset(free)

    @functools.cached_property
    def free(self) -> frozenset[int]:
        """The units that make these."""
        return frozenset(
            i
            for i, unit in enumerate(self.units)
            if all(v in self.free_values for v in (*unit.operands, *unit.results)) and self._is_cheap(unit)
        )

    @functools.cached_property
    def forward(self) -> tuple[int, ...]:
        """The units of the forward pass that some layer has to itself, in order."""
        return tuple(sorted(self.inside - self.backward - self.free))

    def flops(self, unit: Unit) -> float:
        """Operations of one step, on all devices together."""
        return sum(map(self.places.flops, range(unit.start, unit.stop)))

    def is_large(self, value: int) -> bool:
        """Whether a value is worth a thought where it lies."""
        return self.graph.values[value].size > SMALL_SIZE

    def num_bytes(self, values: Iterator[int]) -> float:
        """Bytes of values that are large."""
        return sum(self.graph.values[v].num_bytes for v in values if self.is_large(v))

    def _is_cheap(self, unit: Unit) -> bool:
        nodes = self.graph.nodes[unit.start : unit.stop]
        if any(node.effect or traits_of(node.primitive).contraction for node in nodes):
            return False
        made = sum(self.graph.values[v].size for v in unit.results)
        return self.flops(unit) <= _CHEAP * max(made, SMALL_SIZE)


def _units(trace: Trace, graph: Graph) -> Iterator[Unit]:
    """What is to be together: an equation, a loop, a branch. What a barrier holds up need not be in one layer."""
    for unit in units_of(trace, graph):
        if unit.region is None or unit.region.kind != "barrier":
            yield unit
            continue
        for n in range(unit.start, unit.stop):
            operands = tuple(v for v in graph.nodes[n].operands if v is not None)
            yield Unit(n, n + 1, None, operands, graph.nodes[n].results)


@dataclass(frozen=True, slots=True)
class Chain:
    """The forward pass as one unit after another.

    Args:
        units: positions of `Flow.units`.
        flops: of each.
        cut_bytes: what passes from the first so many units to the others, forward: one less than units.
    """

    units: tuple[int, ...]
    flops: tuple[float, ...]
    cut_bytes: tuple[float, ...]


def chain_of(flow: Flow, units: Sequence[int] | None = None) -> Chain:
    """The chain that layers are made of.

    Args:
        units: of the forward pass, in order; by default all. What passes between others does not count.
    """
    units = flow.forward if units is None else tuple(units)
    at = {i: position for position, i in enumerate(units)}
    passing = [0.0] * (len(units) + 1)
    for position, i in enumerate(units):
        for value in flow.units[i].results:
            last = max((at[r] for r in flow.readers.get(value, ()) if r in at), default=position)
            if flow.is_large(value) and last > position:
                passing[position] += flow.graph.values[value].num_bytes
                passing[last] -= flow.graph.values[value].num_bytes
    for position in range(1, len(units)):
        passing[position] += passing[position - 1]
    return Chain(units, tuple(flow.flops(flow.units[i]) for i in units), tuple(passing[: max(len(units) - 1, 0)]))
