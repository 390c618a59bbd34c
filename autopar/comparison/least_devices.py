"""Find the fewest devices of each kind on which a step fits.

    state of the step / budget -> candidate numbers of devices -> the first with a plan

In: a traced step, hardware profiles. Out: one `Fit` per profile, as soon as it is found. A `Fit` records why each
smaller number is refused: the state alone is too large, or the plans need more memory. A mesh that does not fit a
larger memory does not fit a smaller one, so the search goes through the profiles from the largest memory down and skips
known failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError, MicrobatchError, TimeLimitError
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import DEFAULT_AXIS_NAMES, MeshShape
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.mesh_search import search_meshes
from autopar.planner.plan_assembly import frozen_inputs, input_roles
from autopar.planner.request import PlanRequest, Progress
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Problem, Solution, Solver, Status
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program

#: Default for the most devices to try.
MAX_DEVICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The parameters, optimizer state and gradients of a step, in bytes over all devices.

    The carried arguments of the step determine them: the forward pass reads parameters, and only the update reads
    optimizer state (moments, a master copy). Each floating-point parameter counts one gradient of its dtype.
    """

    num_parameters: int
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float

    @property
    def kept_bytes(self) -> float:
        """Bytes that are live throughout the step under every plan."""
        return self.parameter_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        return self.kept_bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A number of devices on which the step does not fit.

    Args:
        least_bytes: lower bound of the memory per device: the share of the state, or the least of all plans tried.
        planned: whether plans were tried.
        without_plan: the reason why some plans could not be tried: the solver's time limit, or the batch.
    """

    num_devices: int
    least_bytes: float
    planned: bool
    without_plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fewest devices of one kind for one step.

    Args:
        budget_bytes: memory per device that a plan may use.
        plan: plan on the fewest devices; None where none fits.
        refused: smaller numbers of devices in order, with reasons.
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
    roles = input_roles(graph)
    frozen = frozen_inputs(graph, roles)
    for position, (value, role) in enumerate(zip(graph.inputs, roles, strict=True)):
        info = graph.values[value]
        sizes[role] += info.num_bytes
        if role == "parameter" and "float" in info.dtype:
            count += info.size
            gradients += 0.0 if position in frozen else info.num_bytes
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
    """Find the fewest devices of each kind for a step, from the largest memory to the smallest.

    The candidates are `numbers_of_devices`. For each number, the meshes of `meshes_of` are planned with the fewest
    microbatches that fit, and the faster plan is kept.

    Args:
        max_devices: the most devices to try.
        num_microbatches: number of microbatches; by default the fewest that fit.
        per_microbatch_statistics, solver, time_limit_s: as in `plan`.
        progress: callback with a stage's name and the fraction of profiles done.
        more: further options of `plan`: `rematerialize`.

    Raises:
        AutoparError: the step cannot be planned on any hardware.
    """
    report = progress or (lambda stage, fraction: None)
    interruptible = _InterruptibleSolver(solver or Ilp(time_limit_s=time_limit_s))
    state = state_of(program)
    known_failures: dict[Sequence[MeshShape], Refused] = {}
    by_memory = sorted(profiles, key=lambda one: -one.usable_bytes)
    for done, profile in enumerate(by_memory):
        budget = MemoryBudget(profile.usable_bytes).plan_bytes
        refused: list[Refused] = []
        found: Plan | None = None
        for number in numbers_of_devices(profile, max_devices):
            share, meshes = state.kept_bytes / number, meshes_of(number, profile)
            if share > budget:
                refused.append(Refused(num_devices=number, least_bytes=share, planned=False))
            elif meshes in known_failures:  # they do not fit a larger memory
                refused.append(known_failures[meshes])
            else:
                search = _Search(
                    program,
                    PlanRequest(
                        hardware=profile,
                        per_microbatch_statistics=per_microbatch_statistics,
                        solver=interruptible,
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
                    known_failures[meshes] = outcome
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
    """The plan that `fits` makes for a number of devices, or the reason why there is none."""
    report = progress or (lambda stage, fraction: None)
    request = PlanRequest(
        hardware=profile,
        per_microbatch_statistics=per_microbatch_statistics,
        solver=_InterruptibleSolver(solver or Ilp(time_limit_s=time_limit_s)),
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
    """Candidate numbers of devices: 1, 2, 4, ... devices of one host, then 1, 2, 4, ... whole hosts.

    >>> from autopar.hardware.profile import load
    >>> numbers_of_devices(load("h100-sxm"), 40)
    (1, 2, 4, 8, 16, 32)
    """
    host = profile.devices_per_host
    within = [2**k for k in range(host.bit_length()) if 2**k < host]
    hosts = [host * 2**k for k in range(max(1, most // host).bit_length())]
    return tuple(number for number in (*within, *hosts) if number <= most)


def meshes_of(number: int, profile: HardwareProfile) -> tuple[MeshShape, ...]:
    """Candidate meshes of `number` devices: one axis; for several NVLink domains also domains x devices per domain.

    >>> from autopar.hardware.profile import load
    >>> [str(mesh) for mesh in meshes_of(32, load("h100-sxm"))]
    ['4x8', '32']
    """
    flat = MeshShape(DEFAULT_AXIS_NAMES[:1], (number,))
    domain = profile.domain_in(number)
    if number % domain:  # the last domain is not full
        domain = profile.devices_per_host
    if number <= domain or domain == 1:
        return (flat,)
    return (MeshShape(DEFAULT_AXIS_NAMES[:2], (number // domain, domain)), flat)


@dataclass(frozen=True, slots=True)
class _InterruptibleSolver:
    """A solver that raises KeyboardInterrupt on Ctrl-C instead of returning the best solution so far."""

    solver: Solver

    def solve(self, problem: Problem) -> Solution:
        solution = self.solver.solve(problem)
        if solution.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        return solution


@dataclass(frozen=True, slots=True)
class _Search:
    """Searches for a plan of one program on one kind of device.

    Args:
        request: planning request without a mesh.
        report: progress callback.
        num_microbatches: number of microbatches; None for the fewest that fit.
    """

    program: Program
    request: PlanRequest
    report: Callable[[str], None]
    num_microbatches: int | None

    def on(self, meshes: Sequence[MeshShape]) -> Plan | Refused:
        """The plan on the first mesh that fits, or on a later mesh that is faster with as few microbatches."""
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
        """The fastest plan with the fewest microbatches that fit."""
        if self.num_microbatches is not None:
            return self._split(mesh, self.num_microbatches)
        found = self._fewest(mesh)
        if isinstance(found, Refused) or not found.outcome.memory_bound:
            return found
        return self._split(mesh, found.num_microbatches)

    def _fewest(self, mesh: MeshShape) -> Plan | Refused:
        """Any plan with the fewest microbatches that fit, by bisection; none if neither one nor the most fit."""
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
        """The fastest plan with `count` microbatches, or any plan that fits."""
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
            return blank  # the batch cannot be split into so many microbatches

    def _most_microbatches(self, mesh: MeshShape) -> int:
        """The largest power of two that leaves each device of the outer axis one example per microbatch."""
        try:
            examples = num_examples(self.program.as_traced.graph)
        except AutoparError:
            return 1
        each = examples // mesh.axis_sizes[0]
        return max([2**k for k in range(each.bit_length()) if 2**k <= each and examples % 2**k == 0], default=1)


def _least(refused: Sequence[Refused]) -> Refused:
    """The refusal with the lowest memory bound, combined with every reason why plans could not be tried."""
    reasons = " ".join(dict.fromkeys(one.without_plan for one in refused if one.without_plan))
    return replace(min(refused, key=lambda one: one.least_bytes), without_plan=reasons)
