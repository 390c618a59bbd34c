"""Explain that no plan fits: the missing bytes, what is live at the peak, and the price of each way out.

In: a memory budget, the candidate with the lowest peak memory. Out: the user's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.errors import BudgetError, MicrobatchError, TimeLimitError
from autopar.ir.device_program import Buffer, buffers_at_peak
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate, Planning
from autopar.planner.memory_budget import MARGIN, MemoryBudget
from autopar.planner.remat_search import RematSearch, levels_of
from autopar.planner.reshard_to_fit import TooLargeError, resharded_to_fit
from autopar.system.units import human_bytes

#: The search for enough microbatches ends where doubling them saves less than this part of the peak.
_LEAST_SAVED = 0.02
#: Tensors live at the peak that an error names.
_MOST_NAMED = 3


class NothingFitsError(Exception):
    """No plan on a mesh fits. The text says how much memory is missing, and what is live at the peak.

    Pricing the ways out takes planning of its own, so it waits until the error is raised to the user.

    Args:
        ways: returns the ways out as texts, given whether gradient accumulation may be one.
        least_bytes: the lowest peak memory of the plans tried, per device.
    """

    def __init__(self, text: str, ways: Callable[[bool], list[str]], least_bytes: float) -> None:
        super().__init__(text)
        self.ways, self.least_bytes = ways, least_bytes

    def as_budget_error(self, *, split_over_time: bool) -> BudgetError:
        """The error for the user, with the ways out."""
        ways = "; ".join([*self.ways(split_over_time), "a smaller batch or model"])
        return BudgetError(f"{self}. Ways out: {ways}.")


def ways_out(
    budget: float,
    free: Candidate,
    least: Candidate,
    estimate: Callable[[MeshShape], float],
    planning: Planning,
    *,
    rematerialize: bool,
    split_over_time: bool,
) -> list[str]:
    """The changes with which a plan would fit, with their price if it is known, as short texts."""
    mesh, ways = free.formulation.mesh, []
    if not rematerialize:
        levels = levels_of(free)
        made = RematSearch(budget, free, planning, levels, least).fastest() if levels else None
        if made is not None:
            ways.append(f"allow rematerialization (`rematerialize=True`; {_slower(made, free)})")
    if split_over_time and (made := _split_over_time(budget, free, planning)) is not None:
        count = made.program.num_microbatches
        ways.append(
            f'accumulate gradients over microbatches (`num_microbatches={count}`, or `"auto"`; {_slower(made, free)})'
        )
    ways.append(
        f"give `memory_budget_bytes={MemoryBudget.with_room_for(1.001 * least.peak_bytes).total_bytes:.4g}` or more"
    )
    for times in (2, 4, 8):
        larger = MeshShape(mesh.axis_names, (mesh.axis_sizes[0] * times, *mesh.axis_sizes[1:]))
        if estimate(larger) <= budget:
            ways.append(f"use {larger.num_devices} devices (mesh {larger})")
            break
    return ways


def _slower(made: Candidate, free: Candidate) -> str:
    return f"{100 * (made.step_time_s / free.step_time_s - 1):+.0f} %"


def _split_over_time(budget: float, free: Candidate, planning: Planning) -> Candidate | None:
    """The plan with the fewest microbatches of 2, 4, 8, ... that fits without rematerialization."""
    count, before = 2, free.peak_bytes
    while True:
        try:
            split = free.program.in_microbatches(count)  # raises where the batch has fewer examples
            made = planning.free(split.forms[-1], free.formulation, ())
        except (MicrobatchError, TimeLimitError):
            return None
        if made.peak_bytes <= budget:
            return made
        if made.peak_bytes > (1 - _LEAST_SAVED) * before:
            return None
        try:
            return resharded_to_fit(budget, made, planning, at_least=False)
        except (TooLargeError, TimeLimitError):
            count, before = 2 * count, made.peak_bytes


def missing(budget: float, least: Candidate) -> str:
    needed = least.peak_bytes
    short = f"{human_bytes(needed - budget)} short" if needed > 1.001 * budget else "just short"
    tried = "plan tried" if not least.rematerialized else "plan tried, with rematerialization,"
    return (
        f"no plan on mesh {least.formulation.mesh} fits the memory budget of"
        f" {human_bytes(MemoryBudget.with_room_for(budget).total_bytes)} per device, of which {100 * MARGIN:g} % stay free: the"
        f" lowest peak of any {tried} is {human_bytes(needed)},"
        f" {_at_the_peak(least)}, {short}"
    )


def _at_the_peak(made: Candidate) -> str:
    """The time of a plan's peak memory, and what is live at the peak."""
    prediction, graph = made.parts.prediction, made.formulation.graph
    instant, buffers = buffers_at_peak(made.parts.device)
    live = [
        ("parameters", prediction.parameter_bytes),
        ("optimizer state", prediction.optimizer_bytes),
        ("data", prediction.data_bytes + prediction.output_bytes),
        *_by_producer(buffers, graph),
    ]
    named = sorted(live, key=lambda one: -one[1])[: _MOST_NAMED + 1]
    parts = ", ".join(f"{human_bytes(size)} of {name}" for name, size in named if size > 0.01 * prediction.peak_bytes)
    if not made.parts.device.ops:
        return f"with {parts}"
    node = graph.nodes[made.parts.device.ops[instant].node]
    where = f"`{node.path}`" if node.path else f"a {node.primitive}"
    source = f" ({node.source})" if node.source else ""
    return f"in the {node.phase} pass at {where}{source}, with {parts}"


def _by_producer(buffers: Sequence[Buffer], graph: Graph) -> list[tuple[str, float]]:
    sizes: dict[str, float] = {}
    for buffer in buffers:
        node = graph.producer(buffer.value)
        name = f"`{node.primitive}` results" if node else "gathered inputs"
        sizes[name] = sizes.get(name, 0.0) + buffer.num_bytes
    return list(sizes.items())
