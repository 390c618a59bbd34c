"""Find where a step can rematerialize: the step itself, and each forward loop with its backward loop.

If the step runs in microbatches, the body of the loop over microbatches takes the place of the step: it has a forward
and a backward pass of its own.

In: `Trace`. Out: `Site`s: which equations run in the forward pass, and which equations of the backward pass read their
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.frontend.equations import Region
from autopar.frontend.trace import Trace


@dataclass(frozen=True, slots=True)
class Site:
    """A body of equations with a backward pass.

    Args:
        forward: positions of the equations that can be recomputed, in order.
        fixed: values that these equations may read, but that cannot be recomputed: a loop's results and carries.
        read: inputs and values of the body that the backward pass reads, each with the first equation that reads it.
            For a loop, that is the first equation of the backward loop's body.
        start: position where the backward pass begins; for a loop, where the backward loop's body begins.
        num_iterations: trip count of the body. Each iteration's values are live until the backward pass.
        repeat: number of times per step that all of this runs: once for each microbatch.
    """

    forward: tuple[int, ...]
    fixed: frozenset[int]
    read: dict[int, int]
    start: int
    num_iterations: float = 1.0
    repeat: float = 1.0

    @property
    def is_loop(self) -> bool:
        return self.num_iterations > 1


def sites_of(trace: Trace) -> tuple[Site, ...]:
    """The step itself, then its loops."""
    whole = _whole(trace)
    return () if whole is None else (whole, *_loops(trace, whole.repeat))


def _whole(trace: Trace) -> Site | None:
    """The step, or the body of its loop over microbatches."""
    equations = trace.equations
    over = next((region for region in trace.regions if region.source is trace.microbatches), None)
    span = range(len(equations)) if over is None else range(*over.sections[0])
    end = span.stop if over is None else over.exit[0]
    left = trace.outputs if over is None else [a for n in range(*over.exit) for a in equations[n].operands]
    inputs = set(trace.inputs if over is None else ())
    regions = [region for region in trace.regions if region.enter[0] in span]
    inside = {n for region in regions for section in region.sections for n in range(*section)}
    top = [n for n in span if n not in inside]
    start = next((n for n in top if equations[n].phase == "backward"), None)
    if start is None:
        return None
    before = [n for n in top if n < start]
    forward = tuple(n for n in before if not equations[n].piece and not equations[n].effects)
    made = {v for n in before for v in equations[n].results}
    own = {v for n in forward for v in equations[n].results}
    read: dict[int, int] = {}
    entered = {n: region.enter[0] for region in regions for some in (region.enter, region.exit) for n in range(*some)}
    for n in top:
        if n >= start:
            for value in equations[n].reads:
                if value in made or value in inputs:
                    read.setdefault(value, entered.get(n, n))  # the inputs of a loop must be ready before it starts
    for value in left:
        if isinstance(value, int) and value in made:
            read.setdefault(value, end)
    return Site(forward, frozenset(made - own), read, start, repeat=1.0 if over is None else _length(over))


def _loops(trace: Trace, repeat: float) -> Iterator[Site]:
    """Forward loops whose stacked values a later loop of the same trip count reads, slice by slice."""
    equations = trace.equations
    scans = [region for region in trace.regions if region.kind == "scan" and region.source is not trace.microbatches]
    for forward in scans:
        if equations[forward.enter[0]].phase == "backward":
            continue
        stacked = {
            equations[n].results[0]: equations[n].operands[0] for n in range(*forward.exit) if equations[n].stacks
        }
        for backward in scans:
            if backward.enter[0] < forward.exit[1] or _length(backward) != _length(forward):
                continue
            entering = [equations[n] for n in range(*backward.enter) if equations[n].takes_slice]
            taken = [stacked[v] for piece in entering for v in piece.reads if v in stacked]
            if taken and equations[backward.enter[0]].phase == "backward":
                yield _loop(trace, forward, backward, [v for v in taken if isinstance(v, int)], repeat)
                break


def _loop(trace: Trace, forward: Region, backward: Region, taken: Sequence[int], repeat: float) -> Site:
    equations = trace.equations
    span = range(*forward.sections[0])
    nested = {n for region in trace.regions if region.enter[0] in span for n in range(region.enter[0], region.exit[1])}
    own = tuple(n for n in span if n not in nested and not equations[n].effects)
    carried = {v for n in range(*forward.enter) if equations[n].piece == "enter_carry" for v in equations[n].results}
    made = {v for n in nested for v in equations[n].results}
    start = backward.sections[0][0]
    return Site(own, frozenset(carried | made), dict.fromkeys(taken, start), start, _length(forward), repeat)


def _length(region: Region) -> float:
    return float(region.source.params["length"])
