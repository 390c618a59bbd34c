"""Find loops over layers, and the values that are stacked for them.

In: a trace, its graph and its dims. Out: `Stack`s. A loop over layers takes a slice of the state in each iteration and
can be cut between two iterations. All loops that exchange stacked values with it are cut at the same iterations, such
as the loop of the backward pass. So are the values outside the loops that have the layer dim: parameters, their
gradients, the optimizer's moments. A loop over time is not found, because its iterations share their parameters.
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

#: Loops with less than this share of the step's FLOPs are not cut.
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Stack:
    """Loops that are cut at the same iterations.

    Args:
        loops: positions of their first equations.
        dims: the loop over layers outside the loops: its length, and the dims of values that run over layers.
    """

    loops: tuple[int, ...]
    dims: Batch

    @property
    def length(self) -> int:
        return self.dims.size


def stacks_of(trace: Trace, graph: Graph, places: Places) -> Iterator[Stack]:
    """The loops of a step that may be cut, those with most FLOPs first.

    Args:
        graph, places: graph and dims of the trace.
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
        for one in loops:  # and the loops that exchange stacked values with it
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
    """The dims of values that run along loops cut at the same iterations.

    Args:
        loops: positions of their first equations.
    """
    regions = [region for region in trace.regions if region.enter[0] in set(loops)]
    length = _length(regions[0])
    where = places.follow(length, [seed for region in regions for seed in _seeds(trace, region)])
    inputs = tuple(i for i, value in enumerate(graph.inputs) if _is_whole(graph, value, length, where))
    return Stack(tuple(sorted(region.enter[0] for region in regions)), Batch(length, inputs, where))


def _parameters(graph: Graph) -> set[int]:
    """Inputs that may hold parameters: the carried state; without carried state, all inputs but the data."""
    if graph.carried:
        return {graph.inputs[position] for position, _ in graph.carried}
    with suppress(MicrobatchError):  # it has no data
        return set(graph.inputs) - {graph.inputs[position] for position in leading_dim(graph)[1]}
    return set(graph.inputs)


def _length(region: Region) -> int:
    return int(region.source.params["length"])


def _outermost(regions: Iterable[Region]) -> Iterator[Region]:
    """Regions that are in no other region."""
    end = 0
    for region in sorted(regions, key=lambda one: (one.enter[0], -one.exit[1])):
        if region.enter[0] >= end:
            yield region
            end = max(end, region.exit[1], region.enter[1])


def _seeds(trace: Trace, region: Region) -> Iterator[tuple[int, Place]]:
    """The values that a loop takes slices of, and those that it stacks."""
    for n in (*range(*region.enter), *range(*region.exit)):
        equation = trace.equations[n]
        if equation.takes_slice and isinstance(equation.operands[0], int):
            yield equation.operands[0], Place(0)
        elif equation.stacks:
            yield equation.results[0], Place(0)


def _is_whole(graph: Graph, value: int, length: int, where: Mapping[int, frozenset[Place]]) -> bool:
    """Whether a dim of a value is exactly the loop over layers."""
    places = where.get(value, frozenset())
    return len(places) == 1 and all(one.minor == 1 and graph.values[value].shape[one.dim] == length for one in places)
