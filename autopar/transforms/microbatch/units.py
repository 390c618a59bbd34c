"""Group a step's equations into units: one equation, or a whole loop or branch.

In: a trace and its graph. Out: `Unit`s in order. Microbatching and pipelining move each unit as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.frontend.equations import Equation, Region
from autopar.frontend.trace import Trace
from autopar.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Unit:
    """An equation, or a whole loop or branch.

    Args:
        start, stop: range of its equations.
        operands, results: values that it reads and makes, as seen from outside.
    """

    start: int
    stop: int
    region: Region | None
    operands: tuple[int, ...]
    results: tuple[int, ...]


class Placement:
    """Where the units of a step run, relative to the loop over microbatches; a unit may run in two places."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = list(units)
        self.producers = {value: i for i, unit in enumerate(self.units) for value in unit.results}
        self.before, self.inside, self.after = set[int](), set[int](), set[int]()  # positions of units

    def move_inside(self, i: int) -> None:
        """Move a unit from after the loop into it."""
        self.after.discard(i)
        self.inside.add(i)

    def equations(self, place: Iterable[int]) -> frozenset[int]:
        """The positions of the equations of some units."""
        return frozenset(n for i in place for n in range(self.units[i].start, self.units[i].stop))


def backward_of(units: Iterable[Unit], equations: Sequence[Equation]) -> list[Unit]:
    """The units of the backward pass: units traced as backward, and units that read their results."""
    found: list[Unit] = []
    made: set[int] = set()
    for unit in units:
        if equations[unit.start].phase == "backward" or any(v in made for v in unit.operands):
            found.append(unit)
            made.update(unit.results)
    return found


def units_of(trace: Trace, graph: Graph) -> Iterator[Unit]:
    """The units of a step, in order."""
    for start, stop, region in trace.walk():
        reads = graph.nodes[start:stop] if region is None else graph.nodes[slice(*region.enter)]
        makes = reads if region is None else graph.nodes[slice(*region.exit)] or reads
        operands = tuple(v for node in reads for v in node.operands if v is not None)
        yield Unit(start, stop, region, operands, tuple(v for node in makes for v in node.results))
