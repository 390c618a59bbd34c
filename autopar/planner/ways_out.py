"""Explain that no plan fits: the missing memory, the live tensors at the peak, and the ways out with their price.

In: a memory budget, the candidate with the lowest peak memory. Out: the user's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.errors import BudgetError, MicrobatchError, TimeLimitError
from autopar.ir.device_program import Buffer, buffers_at_peak
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.memory_budget import MARGIN, MemoryBudget
from autopar.planner.mesh_task import MeshTask
from autopar.planner.remat_search import RematSearch, levels_of
from autopar.planner.reshard_to_fit import TooLargeError, resharded_to_fit
from autopar.system.units import human_bytes

#: The search for enough microbatches ends where doubling them saves less than this share of the peak.
_LEAST_SAVED = 0.02
#: How many kinds of live tensors an error names, besides the largest.
_MOST_NAMED = 3


class NothingFitsError(Exception):
    """No plan on a mesh fits. The text names the missing memory, and the live tensors at the peak.

    The ways out are priced only when the error is shown to the user, because pricing them takes further planning.

    Args:
        ways: returns the ways out as texts, given whether gradient accumulation may be one.
        least_bytes: the lowest peak memory of all plans tried, per device.
    """

    def __init__(self, text: str, ways: Callable[[bool], list[str]], least_bytes: float) -> None:
        super().__init__(text)
        self.ways, self.least_bytes = ways, least_bytes

    def as_budget_error(self, *, accumulate: bool) -> BudgetError:
        """The error for the user, with the ways out.

        Args:
            accumulate: whether gradient accumulation may be a way out.
        """
        ways = "; ".join([*self.ways(accumulate), "a smaller batch or model"])
        return BudgetError(f"{self}. Ways out: {ways}.")


def ways_out(
    task: MeshTask,
    unlimited: Candidate,
    smallest: Candidate,
    estimate: Callable[[MeshShape], float],
    *,
    accumulate: bool,
) -> list[str]:
    """The changes that would make a plan fit, as short texts, with the longer step time where it is known.

    Args:
        unlimited: the plan without a memory limit.
        smallest: the plan with the lowest peak memory.
        estimate: estimates the lowest peak on another mesh, in bytes per device.
        accumulate: whether gradient accumulation may be a way out.
    """
    mesh, ways = unlimited.formulation.mesh, []
    if not task.request.rematerialize:
        levels = levels_of(unlimited)
        plan = RematSearch(task, unlimited, levels, smallest).fastest() if levels else None
        if plan is not None:
            ways.append(f"allow rematerialization (`rematerialize=True`; {_slowdown(plan, unlimited)})")
    if accumulate and (plan := _with_microbatches(task, unlimited)) is not None:
        count, slower = plan.program.num_microbatches, _slowdown(plan, unlimited)
        ways.append(f'accumulate gradients over microbatches (`num_microbatches={count}`, or `"auto"`; {slower})')
    ways.append(
        f"give `memory_budget_bytes={MemoryBudget.with_room_for(1.001 * smallest.peak_bytes).total_bytes:.4g}` or more"
    )
    for times in (2, 4, 8):
        larger = MeshShape(mesh.axis_names, (mesh.axis_sizes[0] * times, *mesh.axis_sizes[1:]))
        if estimate(larger) <= task.budget_bytes:
            ways.append(f"use {larger.num_devices} devices (mesh {larger})")
            break
    return ways


def _slowdown(plan: Candidate, unlimited: Candidate) -> str:
    return f"{100 * (plan.step_time_s / unlimited.step_time_s - 1):+.0f} %"


def _with_microbatches(task: MeshTask, unlimited: Candidate) -> Candidate | None:
    """The plan with the fewest microbatches of 2, 4, 8, ... that fits without rematerialization."""
    count, before = 2, unlimited.peak_bytes
    while True:
        try:
            split = unlimited.program.in_microbatches(count)  # raises where the batch has fewer examples
            plan = task.plan_without_limit(split.forms[-1], unlimited.formulation, ())
        except (MicrobatchError, TimeLimitError):
            return None
        if plan.peak_bytes <= task.budget_bytes:
            return plan
        if plan.peak_bytes > (1 - _LEAST_SAVED) * before:
            return None
        try:
            return resharded_to_fit(task, plan, minimize_peak=False)
        except (TooLargeError, TimeLimitError):
            count, before = 2 * count, plan.peak_bytes


def missing(budget: float, smallest: Candidate) -> str:
    """The missing memory, where the peak is, and what is live there; as a text.

    Args:
        budget: bytes that a plan may fill.
        smallest: the plan with the lowest peak memory.
    """
    needed = smallest.peak_bytes
    short = f"{human_bytes(needed - budget)} short" if needed > 1.001 * budget else "just short"
    tried = "plan tried" if not smallest.rematerialized else "plan tried, with rematerialization,"
    return (
        f"no plan on mesh {smallest.formulation.mesh} fits the memory budget of"
        f" {human_bytes(MemoryBudget.with_room_for(budget).total_bytes)} per device, of which {100 * MARGIN:g} % stay free: the"
        f" lowest peak of any {tried} is {human_bytes(needed)},"
        f" {_at_the_peak(smallest)}, {short}"
    )


def _at_the_peak(plan: Candidate) -> str:
    """The operation at which a plan's memory peaks, and the tensors that are live there."""
    prediction, graph, device = plan.parts.prediction, plan.formulation.graph, plan.parts.device
    instant, buffers = buffers_at_peak(device)
    live = [
        ("parameters", prediction.parameter_bytes),
        ("optimizer state", prediction.optimizer_bytes),
        ("data", prediction.data_bytes + prediction.output_bytes),
        *_by_producer(buffers, graph),
    ]
    named = sorted(live, key=lambda one: -one[1])[: _MOST_NAMED + 1]
    parts = ", ".join(f"{human_bytes(size)} of {name}" for name, size in named if size > 0.01 * prediction.peak_bytes)
    if not device.ops:
        return f"with {parts}"
    node = graph.nodes[device.ops[instant].node]
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
