"""Divide a step into forward, backward, and the parts before and after the loop over microbatches.

In: a trace, its graph, and which equations run for each microbatch. Out: `Flow`: its units, which of them run forward
and which backward, and which belong to no layer. The last depend on data and small values alone, so each layer that
reads them can compute them itself.
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

#: Each layer may have its own copy of state of at most this many elements (a counter, a key, a learning rate).
_FEW = 16
#: FLOPs per result element up to which each layer may run a unit itself; random bits take about this many.
_CHEAP = 256.0


@dataclass(frozen=True)
class Flow:
    """The units of a step.

    Args:
        places: batch dims of the graph.
    """

    trace: Trace
    graph: Graph
    split: Split
    places: Places
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, trace: Trace, graph: Graph, split: Split, places: Places) -> Flow:
        """The flow of a classified step."""
        return cls(trace, graph, split, places, tuple(_units(trace, graph)))

    @functools.cached_property
    def producer(self) -> dict[int, int]:
        """Value -> the unit that makes it."""
        return {value: i for i, unit in enumerate(self.units) for value in unit.results}

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """Value -> the units that read it, in order."""
        found: dict[int, list[int]] = {}
        for i, unit in enumerate(self.units):
            for value in unit.operands:
                found.setdefault(value, []).append(i)
        return found

    @functools.cached_property
    def inside(self) -> frozenset[int]:
        """Units that run for each microbatch."""
        return frozenset(i for i, unit in enumerate(self.units) if unit.start in self.split.inside)

    @functools.cached_property
    def backward(self) -> frozenset[int]:
        """Units of the backward pass that run for each microbatch."""
        at = {unit.start: i for i, unit in enumerate(self.units)}
        inside = [self.units[i] for i in sorted(self.inside)]
        return frozenset(at[unit.start] for unit in backward_of(inside, self.trace.equations))

    @functools.cached_property
    def free_values(self) -> frozenset[int]:
        """Values that every layer may have: data, constants, small state, and values computed cheaply from these."""
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
        """Units that make free values."""
        return frozenset(
            i
            for i, unit in enumerate(self.units)
            if all(v in self.free_values for v in (*unit.operands, *unit.results)) and self._is_cheap(unit)
        )

    @functools.cached_property
    def forward(self) -> tuple[int, ...]:
        """The units of the forward pass that belong to a layer, in order."""
        return tuple(sorted(self.inside - self.backward - self.free))

    def flops(self, unit: Unit) -> float:
        """FLOPs of one step, on all devices together."""
        return sum(map(self.places.flops, range(unit.start, unit.stop)))

    def is_large(self, value: int) -> bool:
        """Whether a value is large enough to count when it passes between layers."""
        return self.graph.values[value].size > SMALL_SIZE

    def num_bytes(self, values: Iterator[int]) -> float:
        """Bytes of the large ones among these values."""
        return sum(self.graph.values[v].num_bytes for v in values if self.is_large(v))

    def _is_cheap(self, unit: Unit) -> bool:
        nodes = self.graph.nodes[unit.start : unit.stop]
        if any(node.effect or traits_of(node.primitive).contraction for node in nodes):
            return False
        made = sum(self.graph.values[v].size for v in unit.results)
        return self.flops(unit) <= _CHEAP * max(made, SMALL_SIZE)


def _units(trace: Trace, graph: Graph) -> Iterator[Unit]:
    """Equations, loops and branches. A barrier is divided into its pieces, which may be in different layers."""
    for unit in units_of(trace, graph):
        if unit.region is None or unit.region.kind != "barrier":
            yield unit
            continue
        for n in range(unit.start, unit.stop):
            operands = tuple(v for v in graph.nodes[n].operands if v is not None)
            yield Unit(n, n + 1, None, operands, graph.nodes[n].results)


@dataclass(frozen=True, slots=True)
class Chain:
    """The forward pass as a sequence of units.

    Args:
        units: positions in `Flow.units`.
        flops: FLOPs of each unit.
        cut_bytes: at each cut between two neighbours, bytes of the values that pass it; one less than units.
    """

    units: tuple[int, ...]
    flops: tuple[float, ...]
    cut_bytes: tuple[float, ...]


def chain_of(flow: Flow, units: Sequence[int] | None = None) -> Chain:
    """The sequence of units that layers are cut from.

    Args:
        units: units of the forward pass, in order; by default all. Values that pass between other units do not count.
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
