"""Where a step may compute forward values again: the step itself, and each loop with its loop in the backward pass.

Where the batch is split over time, the body of the loop over microbatches stands for the step: it has a forward and a
backward pass of its own.

In: `Trace`. Out: `Site`s: which equations run in the forward pass, which read their values in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.frontend.equations import Region
from autopar.frontend.trace import Trace


@dataclass(frozen=True, slots=True)
class Site:
    """One body of equations, and where it is followed by the backward pass.

    Args:
        forward: positions of the equations that may run again, in order.
        fixed: values that others of the body read, and that cannot be computed again: what a loop makes, or carries.
        read: values of the body, and inputs, that the backward pass reads, with the first equation there that does; for
            a loop, the first of the backward loop's body.
        start: of the backward pass, in the step; in a loop, of the backward loop's body.
        num_iterations: how often the body runs, and each time holds its values until the backward pass.
        repeat: how often all this is done: once for each microbatch.
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
    """The step, or what it does with each microbatch."""
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
                    read.setdefault(value, entered.get(n, n))  # what a loop reads must be there before it
    for value in left:
        if isinstance(value, int) and value in made:
            read.setdefault(value, end)
    return Site(forward, frozenset(made - own), read, start, repeat=1.0 if over is None else _length(over))


def _loops(trace: Trace, repeat: float) -> Iterator[Site]:
    """Forward loops whose stacks a later loop of as many num_iterations takes apart."""
    equations = trace.equations
    scans = [region for region in trace.regions if region.kind == "scan" and region.source is not trace.microbatches]
    for forward in scans:
        if equations[forward.enter[0]].phase == "backward":
            continue
        stacked = {
            equations[n].results[0]: equations[n].operands[0]
            for n in range(*forward.exit)
            if equations[n].piece == "exit_stack"
        }
        for backward in scans:
            if backward.enter[0] < forward.exit[1] or _length(backward) != _length(forward):
                continue
            entering = [equations[n] for n in range(*backward.enter) if equations[n].piece == "enter_slice"]
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
