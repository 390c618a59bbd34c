"""The least number of devices of each kind on which a step fits.

    state of the step / budget -> numbers worth planning -> the first with a plan

In: a traced step and hardware profiles. Out: `Fit`s, one for each profile, as they are found. A number of devices is
given up only for a reason that the `Fit` holds: that the state alone is too large, or what the planner needed at the
least. Memory falls with the number of devices, and what does not fit a larger memory does not fit a smaller one: so
profiles are taken from the largest memory on, and numbers that were planned in vain are not planned again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.hardware_profile import HardwareProfile
from autopar.errors import AutoparError, MicrobatchError, TimeLimitError
from autopar.ir.mesh import DEFAULT_AXIS_NAMES, MeshShape
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.mesh_search import search_meshes
from autopar.planner.plan_assembly import input_roles
from autopar.planner.request import PlanRequest, Progress
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Problem, Solution, Solver, Status
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program

#: Devices that are tried at the most, unless the user says how many.
MAX_DEVICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What of a step stays from one to the next, and its gradients, in bytes on all devices together.

    Read off the step's arguments: a parameter is carried, and read by the forward pass; optimizer state is carried,
    and read by the update alone (moments, a master copy). A gradient is counted for each floating parameter, in its
    dtype.
    """

    num_parameters: int
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float

    @property
    def kept_bytes(self) -> float:
        """What is in memory at every instant, whatever the plan."""
        return self.parameter_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        return self.kept_bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A number of devices on which the step does not fit.

    Args:
        least_bytes: what it needs on each at the least: its state's share, or what the plans tried need.
        planned: whether plans were tried. without_plan: the solver or the batch left some untried: the reason.
    """

    num_devices: int
    least_bytes: float
    planned: bool
    without_plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one step needs of one kind of device.

    Args:
        budget_bytes: of one device, what a plan may fill.
        plan: on the least number of devices found; None where none was.
        refused: smaller numbers, in order, each with its reason.
    """

    profile: HardwareProfile
    budget_bytes: float
    plan: Plan | None
    refused: tuple[Refused, ...]

    @property
    def num_devices(self) -> int | None:
        return None if self.plan is None else self.plan.mesh.num_devices

    @property
    def on_one(self) -> bool:
        """Whether it fits on one device."""
        return self.num_devices == 1


def state_of(program: Program) -> TrainingState:
    """The training state of a step, from the shapes of its arguments."""
    graph = program.as_traced.graph
    sizes = {"parameter": 0.0, "optimizer": 0.0, "data": 0.0}
    count, gradients = 0, 0.0
    for value, role in zip(graph.inputs, input_roles(graph), strict=True):
        info = graph.values[value]
        sizes[role] += info.num_bytes
        if role == "parameter" and "float" in info.dtype:
            count += info.size
            gradients += info.num_bytes
    return TrainingState(
        num_parameters=count,
        parameter_bytes=sizes["parameter"],
        gradient_bytes=gradients,
        optimizer_bytes=sizes["optimizer"],
    )


def fits(
    program: Program,
    profiles: Sequence[HardwareProfile],
    *,
    max_devices: int = MAX_DEVICES,
    num_microbatches: int | None = None,
    per_microbatch_statistics: bool = False,
    solver: Solver | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    **more: Any,
) -> Iterator[Fit]:
    """What a step needs of each kind of device, from the largest memory to the smallest; each as it is found.

    Numbers of devices are powers of two within a host, and whole hosts beyond: `numbers_of_devices`. Of each number few
    meshes are planned: `meshes_of`, with the fewest microbatches that fit; of two meshes the faster is kept.

    Args:
        max_devices: the most to try.
        num_microbatches: exactly so many; by default as few as fit.
        per_microbatch_statistics, solver, time_limit_s: as of `plan`.
        progress: called with a stage's name and the fraction of the profiles done.
        more: as of `plan`: `rematerialize`.

    Raises:
        AutoparError: the step cannot be planned on any hardware.
    """
    report = progress or (lambda stage, fraction: None)
    solve_with = _Stopping(solver or Ilp(time_limit_s=time_limit_s))
    state = state_of(program)
    in_vain: dict[Sequence[MeshShape], Refused] = {}
    by_memory = sorted(profiles, key=lambda one: -one.usable_bytes)
    for done, profile in enumerate(by_memory):
        budget = MemoryBudget(profile.usable_bytes).plan_bytes
        refused: list[Refused] = []
        found: Plan | None = None
        for number in numbers_of_devices(profile, max_devices):
            share, meshes = state.kept_bytes / number, meshes_of(number, profile)
            if share > budget:
                refused.append(Refused(num_devices=number, least_bytes=share, planned=False))
            elif meshes in in_vain:  # where there was more memory
                refused.append(in_vain[meshes])
            else:
                search = _Search(
                    program,
                    PlanRequest(
                        hardware=profile,
                        per_microbatch_statistics=per_microbatch_statistics,
                        solver=solve_with,
                        **more,
                    ),
                    lambda what, p=profile, n=done: report(f"{p.name}: {what}", n / len(by_memory)),
                    num_microbatches,
                )
                outcome = search.on(meshes)
                if isinstance(outcome, Plan):
                    found = outcome
                    break
                if not outcome.without_plan:
                    in_vain[meshes] = outcome
                refused.append(outcome)
        yield Fit(profile=profile, budget_bytes=budget, plan=found, refused=tuple(refused))
    report("done", 1.0)


def plan_on(
    program: Program,
    profile: HardwareProfile,
    number: int,
    *,
    num_microbatches: int | None = None,
    per_microbatch_statistics: bool = False,
    solver: Solver | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    **more: Any,
) -> Plan | Refused:
    """The plan for a number of devices, found as `fits` finds it; or why there is none."""
    report = progress or (lambda stage, fraction: None)
    request = PlanRequest(
        hardware=profile,
        per_microbatch_statistics=per_microbatch_statistics,
        solver=_Stopping(solver or Ilp(time_limit_s=time_limit_s)),
        **more,
    )
    search = _Search(
        program,
        request,
        lambda what: report(f"{profile.name}: {what}", 1.0),
        num_microbatches,
    )
    return search.on(meshes_of(number, profile))


def numbers_of_devices(profile: HardwareProfile, most: int) -> tuple[int, ...]:
    """1, 2, 4, ... devices of one host, then 1, 2, 4, ... whole hosts.

    >>> from autopar.cost.hardware_profile import load
    >>> numbers_of_devices(load("h100-sxm"), 40)
    (1, 2, 4, 8, 16, 32)
    """
    host = profile.devices_per_host
    within = [2**k for k in range(host.bit_length()) if 2**k < host]
    hosts = [host * 2**k for k in range(max(1, most // host).bit_length())]
    return tuple(number for number in (*within, *hosts) if number <= most)


def meshes_of(number: int, profile: HardwareProfile) -> tuple[MeshShape, ...]:
    """The meshes that are planned for so many devices: all on one axis; and beyond a host, hosts by devices of one.

    >>> from autopar.cost.hardware_profile import load
    >>> [str(mesh) for mesh in meshes_of(32, load("h100-sxm"))]
    ['4x8', '32']
    """
    line = MeshShape(DEFAULT_AXIS_NAMES[:1], (number,))
    host = profile.devices_per_host
    if number <= host or host == 1:
        return (line,)
    return (MeshShape(DEFAULT_AXIS_NAMES[:2], (number // host, host)), line)


@dataclass(frozen=True, slots=True)
class _Stopping:
    """A solver that Ctrl-C stops, rather than ends with the best assignment so far: here there is more to come."""

    solver: Solver

    def solve(self, problem: Problem) -> Solution:
        solution = self.solver.solve(problem)
        if solution.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        return solution


@dataclass(frozen=True, slots=True)
class _Search:
    """A plan of one program on one hardware, or the reason why there is none.

    Args:
        request: on any mesh. report: called with what is planned.
        num_microbatches: exactly so many; as few as fit where it is None.
    """

    program: Program
    request: PlanRequest
    report: Callable[[str], None]
    num_microbatches: int | None

    def on(self, meshes: Sequence[MeshShape]) -> Plan | Refused:
        """A plan on the first mesh that has one, or on a later one that is faster with as few microbatches."""
        best: Plan | None = None
        refused: list[Refused] = []
        for mesh in meshes:
            outcome = self._on_mesh(mesh) if best is None else self._split(mesh, best.num_microbatches)
            if isinstance(outcome, Refused):
                refused.append(outcome)
            elif best is None or outcome.prediction.step_time_s < best.prediction.step_time_s:
                best = outcome
        return best or _least(refused)

    def _on_mesh(self, mesh: MeshShape) -> Plan | Refused:
        """The fastest plan with the fewest microbatches with which anything fits."""
        if self.num_microbatches is not None:
            return self._split(mesh, self.num_microbatches)
        found = self._fewest(mesh)
        if isinstance(found, Refused) or not found.outcome.memory_bound:
            return found
        return self._split(mesh, found.num_microbatches)

    def _fewest(self, mesh: MeshShape) -> Plan | Refused:
        """Any plan with the fewest microbatches that have one: where neither one nor the most do, none does."""
        refused, high = self._split(mesh, 1, any_that_fits=True), self._most_microbatches(mesh).bit_length() - 1
        if isinstance(refused, Plan) or high == 0:
            return refused
        fitting = self._split(mesh, 2**high, any_that_fits=True)
        if isinstance(fitting, Refused):
            return _least([refused, fitting])
        low = 0
        while high - low > 1:  # 2**low does not fit, 2**high does
            middle = self._split(mesh, 2 ** ((low + high) // 2), any_that_fits=True)
            if isinstance(middle, Plan):
                fitting, high = middle, (low + high) // 2
            else:
                low = (low + high) // 2
        return fitting

    def _split(self, mesh: MeshShape, count: int, *, any_that_fits: bool = False) -> Plan | Refused:
        """The fastest plan with exactly so many microbatches, or any that fits."""
        parts = f", {count} microbatches" if count > 1 else ""
        self.report(f"{mesh.num_devices} devices, mesh {mesh}{parts}")
        blank = Refused(num_devices=mesh.num_devices, least_bytes=math.inf, planned=True)
        try:
            own = self.request.per_microbatch_statistics
            split = self.program.as_traced.in_microbatches(count, own_statistics=own)
            return search_meshes(split, replace(self.request, mesh=mesh, any_that_fits=any_that_fits)).plan
        except NothingFitsError as short:
            return replace(blank, least_bytes=short.least_bytes)
        except TimeLimitError as error:
            return replace(blank, without_plan=str(error))
        except MicrobatchError:
            if self.num_microbatches is not None:
                raise
            return blank  # a batch that cannot be split is no way out

    def _most_microbatches(self, mesh: MeshShape) -> int:
        """The largest power of two that leaves each device of the outer axis an example of a microbatch."""
        try:
            examples = num_examples(self.program.as_traced.graph)
        except AutoparError:
            return 1
        each = examples // mesh.axis_sizes[0]
        return max([2**k for k in range(each.bit_length()) if 2**k <= each and examples % 2**k == 0], default=1)


def _least(refused: Sequence[Refused]) -> Refused:
    """What needs least of those tried, and why some have no plan."""
    reasons = " ".join(dict.fromkeys(one.without_plan for one in refused if one.without_plan))
    return replace(min(refused, key=lambda one: one.least_bytes), without_plan=reasons)
