"""Loops over layers, and what is stacked for them.

In: a trace, its graph and where dims stand in it. Out: `Stack`s. A loop that takes a slice of the state in each trip runs
one layer after another, and may be cut between two trips. With it are cut all loops that it hands stacks to, such as
that of the backward pass, and what stands along these stacks outside of loops: parameters, their gradients, the
optimizer's moments. So nothing is said of a loop over time, whose trips share their parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Region
from autopar.frontend.trace import Trace
from autopar.ir.graph import Graph
from autopar.transforms.microbatch.batch_dims import Batch, Place, Places, leading_dim

#: Loops with less than this share of the step's work are left whole.
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Stack:
    """Loops that are cut at the same trips.

    Args:
        loops: where they begin among the equations.
        dims: the loop over layers, outside of the loops: its length, and where it stands.
    """

    loops: tuple[int, ...]
    dims: Batch

    @property
    def length(self) -> int:
        return self.dims.size


def stacks_of(trace: Trace, graph: Graph, places: Places) -> Iterator[Stack]:
    """The loops of a step that may be cut, those with most work first.

    Args:
        graph, places: of the trace.
    """
    outer = {region.enter[0]: region for region in _outermost(trace.regions) if region.kind == "scan"}
    state = _parameters(graph)
    work = {start: sum(map(places.flops, range(start, one.exit[1]))) for start, one in outer.items()}
    least = _WORTH * sum(map(places.flops, range(len(graph.nodes))))
    taken = set[int]()
    for start in sorted(outer, key=lambda start: -work[start]):
        length = _length(outer[start])
        if start in taken or length < 2:
            continue
        loops = [start]
        for one in loops:  # and what it hands stacks to, or takes them from
            found = places.follow(length, _seeds(trace, outer[one]))
            for other in outer:
                may_match = other not in loops and other not in taken and _length(outer[other]) == length
                if may_match and any(place in found.get(v, ()) for v, place in _seeds(trace, outer[other])):
                    loops.append(other)
        stack = stack_of(trace, graph, places, loops)
        if sum(work[one] for one in loops) >= least and any(graph.inputs[i] in state for i in stack.dims.inputs):
            taken.update(loops)
            yield stack


def stack_of(trace: Trace, graph: Graph, places: Places, loops: Iterable[int]) -> Stack:
    """What stands along loops that are cut at the same trips.

    Args:
        loops: where they begin among the equations.
    """
    regions = [region for region in trace.regions if region.enter[0] in set(loops)]
    length = _length(regions[0])
    where = places.follow(length, [seed for region in regions for seed in _seeds(trace, region)])
    inputs = tuple(i for i, value in enumerate(graph.inputs) if _is_whole(graph, value, length, where))
    return Stack(tuple(sorted(region.enter[0] for region in regions)), Batch(length, inputs, where))


def _parameters(graph: Graph) -> set[int]:
    """What each layer has of its own: what a step trains, or takes besides its data."""
    if graph.carried:
        return {graph.inputs[position] for position, _ in graph.carried}
    with suppress(MicrobatchError):  # it has no data
        return set(graph.inputs) - {graph.inputs[position] for position in leading_dim(graph)[1]}
    return set(graph.inputs)


def _length(region: Region) -> int:
    return int(region.source.params["length"])


def _outermost(regions: Iterable[Region]) -> Iterator[Region]:
    """Regions that stand in no other."""
    end = 0
    for region in sorted(regions, key=lambda one: (one.enter[0], -one.exit[1])):
        if region.enter[0] >= end:
            yield region
            end = max(end, region.exit[1], region.enter[1])


def _seeds(trace: Trace, region: Region) -> Iterator[tuple[int, Place]]:
    """What a loop takes slices of, and what it stacks."""
    for n in (*range(*region.enter), *range(*region.exit)):
        equation = trace.equations[n]
        if equation.piece == "enter_slice" and isinstance(equation.operands[0], int):
            yield equation.operands[0], Place(0)
        elif equation.piece == "exit_stack":
            yield equation.results[0], Place(0)


def _is_whole(graph: Graph, value: int, length: int, where: Mapping[int, frozenset[Place]]) -> bool:
    """Whether a dim of a value is the loop, and nothing besides."""
    places = where.get(value, frozenset())
    return len(places) == 1 and all(one.minor == 1 and graph.values[value].shape[one.dim] == length for one in places)
