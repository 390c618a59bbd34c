"""Find or make the plans of a step: a given plan, a plan from an earlier call, or one made once for all processes.

In: a step, its options or a given plan; a call. Out: `Planned`: the plan, its traced program, and the parts of the
step's result that are no arrays.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.api import make_plan as plan_step
from autopar.api.plan_in_stages import cluster_of
from autopar.errors import PlanMismatchError
from autopar.frontend.call import Call, Results
from autopar.frontend.step import Step
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.jax_interop.compilation_cache import compiled_kept_in
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.plan_files import plan_from_json
from autopar.planner.cache import plans as plan_cache
from autopar.planner.request import PlanRequest, requested_profile
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.distributed.device_order import in_host_order
from autopar.runtime.distributed.exchange import Exchange, among_processes
from autopar.runtime.distributed.plan_agreement import agreed_plan, with_hosts
from autopar.system.progress import announced_by_progress
from autopar.transforms.program import Program, program_of_call

#: The number of plans for the same shapes at which a warning is logged.
_MANY = 4


def _of(program: Program, plan: AnyPlan) -> Program:
    """The step in the form that a plan was made for; for a pipeline plan, as written."""
    if isinstance(plan, PipelinePlan):
        return program.as_traced.forms[-1]
    return program.of(plan)


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, its program, and the parts of the step's result that are no arrays."""

    plan: AnyPlan
    program: Program
    results: Results


class StepPlans:
    """The plans of one step.

    Args:
        called: the step.
        fixed: a plan to use instead of planning.
        options: the options of `autopar.plan`; `like` may be the plans of another step.
    """

    def __init__(self, called: Step, fixed: AnyPlan | None, options: Mapping[str, Any]) -> None:
        self.called, self.fixed = called, fixed
        like = options.get("like")
        shared: dict[str, Any] = {}
        if isinstance(like, StepPlans):  # its devices, unless others are given; the mesh of stages is in its plan
            shared = {k: v for k, v in like.options.items() if k in ("mesh", "hardware")}
            if like.options.get("stages", 1) != 1 and not isinstance(shared.get("mesh"), Mesh):
                shared.pop("mesh", None)
        self.options: dict[str, Any] = shared | dict(options)
        self.latest: AnyPlan | None = None  # the last one made or used
        self._known: dict[Any, Planned] = {}  # by the key of a call

    def of(self, call: Call, *, to_run: bool = False) -> Planned:
        """The plan of a call.

        Args:
            to_run: whether the plan's devices must be visible.

        Raises:
            AutoparError: a subclass; the text says what to change.
        """
        if call.key not in self._known:
            self._warn_of_many(call)
            exchange = among_processes()
            if exchange is not None:
                plan, program = self._agreed(exchange, call, to_run)
            else:
                program = self._traced(call, to_run)
                plan = plan_step.planning(**self._shown_options())(program) if self.fixed is None else self.fixed
            plan, program = self._as_given(plan, program)
            assert call.results is not None, "it has been traced"
            self._known[call.key] = Planned(plan, program, call.results)
        self.latest = self._known[call.key].plan
        return self._known[call.key]

    def know(self, call: Call, planned: Planned) -> None:
        """Use this plan for calls like this one."""
        self._known[call.key] = planned

    def mesh(self, plan: Plan) -> Mesh:
        """The mesh that a plan of one program runs on."""
        given = self.options.get("mesh")
        if isinstance(given, Mesh):
            return execute.auto_mesh(given)
        return execute.make_mesh(plan.mesh, available=plan.available_devices)

    def devices(self) -> list[Any]:
        """The devices of a pipeline, in order."""
        given = self.options.get("mesh")
        return list(given.devices.flat) if isinstance(given, Mesh) else in_host_order(jax.devices())

    def profiles(self, plan: PipelinePlan) -> dict[str, HardwareProfile]:
        """The profile of each kind of device in a plan's cluster; a given profile takes precedence."""
        given = self.options.get("hardware")
        if isinstance(given, HardwareProfile):
            return {given.name: given}
        names = given if isinstance(given, Mapping) else [given] if given is not None else plan.cluster.kinds
        return {profile.name: profile for profile in map(requested_profile, names)}

    def planning_options(self) -> dict[str, Any]:
        """The options for `plan_program`: all except those of tracing, with `like` as a plan.

        Raises:
            PlanMismatchError: `like` is a step without a plan.
        """
        used = ("carry", "donate", "static_argnames")
        options: dict[str, Any] = {"cache": True} | {n: v for n, v in self.options.items() if n not in used}
        like = options.get("like")
        if isinstance(like, StepPlans):
            if like.latest is None:
                raise PlanMismatchError(
                    f"`like` of `{self.called.name}` is the step `{like.called.name}`, which has no plan yet: call that step"
                    " first, or its `init` or `plan`"
                )
            options["like"] = like.latest
        return options

    def compiled_kept(self, plan: AnyPlan) -> AbstractContextManager[None]:
        """A context in which compiled programs are read from and written to the plan's cache folder."""
        folder = plan_cache.folder_of(self.options.get("cache", True))
        return compiled_kept_in(folder and folder / "compiled" / plan.program.fingerprint)

    # -- helpers -----------------------------------------------------------------------------

    def _traced(self, call: Call, to_run: bool) -> Program:
        if to_run and not isinstance(self.options.get("mesh"), Mesh):
            self._check_devices()  # before planning, which takes long
        return program_of_call(call, carry=self.options.get("carry"), donate=self.options.get("donate"))

    def _shown_options(self) -> dict[str, Any]:
        """The planning options, with progress on the terminal unless the user gives `progress`."""
        options = self.planning_options()
        if options.get("progress") is None:
            options["progress"] = announced_by_progress(f"planning `{self.called.name}`")
        return options

    def _agreed(self, exchange: Exchange, call: Call, to_run: bool) -> tuple[AnyPlan, Program]:
        """The plan of process 0, sent to all processes."""

        def planned(program: Program) -> AnyPlan:
            options = self._shown_options() | {"all_devices": True}  # each process has a part of every array
            hardware = options.get("hardware")
            if not isinstance(hardware, Mapping) and self._num_devices() == jax.device_count():
                options["hardware"] = with_hosts(hardware)
            return plan_step.plan_program(program, **options)

        name, traced = self.called.name, lambda: self._traced(call, to_run)
        options = self.options | ({} if self.fixed is not None else self.planning_options())
        return agreed_plan(exchange, name, traced, planned, plan_from_json, options, self.fixed)

    def _as_given(self, plan: AnyPlan, program: Program) -> tuple[AnyPlan, Program]:
        """Return a plan, and the program in the plan's form. A given plan is first compared with the program.

        Raises:
            PlanMismatchError: the plan was made for another program.
        """
        program = _of(program, plan)
        if self.fixed is None:
            return plan, program
        difference = plan.program.difference(program.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"the given plan was made for another program than `{self.called.name}` with these arguments:"
                f" {difference}. Plan again, or call the step with the arguments that the plan was made for."
            )
        trees = {"in_tree": program.trace.in_tree, "out_tree": program.trace.out_tree}  # plan files do not contain them
        return dataclasses.replace(plan, **trees), program

    def _check_devices(self) -> None:
        """Refuse to plan for devices that are not visible."""
        if self._is_staged():
            num_devices = self._num_devices()
            if len(jax.devices()) != num_devices:
                execute.check_devices(MeshShape(("device",), (num_devices,)), jax.devices())
        else:
            shape, available = self._mesh_shape()
            if len(jax.devices()) == available:
                execute.first_devices(shape, jax.devices())
            else:
                execute.check_devices(shape, jax.devices())

    def _is_staged(self) -> bool:
        if self.fixed is not None:
            return isinstance(self.fixed, PipelinePlan)
        return self.options.get("stages", 1) != 1 or self._stages_like() is not None

    def _stages_like(self) -> PipelinePlan | None:
        """The plan in stages that this step is planned like."""
        like = self.options.get("like")
        plan = like.latest if isinstance(like, StepPlans) else like
        return plan if isinstance(plan, PipelinePlan) else None

    def _num_devices(self) -> int:
        """The number of devices that the step runs on."""
        given = self.fixed if self.fixed is not None else self._stages_like()
        if isinstance(given, PipelinePlan):
            return given.cluster.num_devices
        if not self._is_staged():
            shape, available = self._mesh_shape()
            return available or shape.num_devices
        options = (self.options.get(name) for name in ("hardware", "num_devices", "mesh"))
        return cluster_of(*options)[0].num_devices

    def _mesh_shape(self) -> tuple[MeshShape, int | None]:
        """The mesh of one program; if the planner chooses the mesh, any mesh over all devices. And the number of devices of which
        it takes a part."""
        if isinstance(self.fixed, Plan):
            return self.fixed.mesh, self.fixed.available_devices
        options = self.planning_options()
        request = PlanRequest(mesh=options.get("mesh"), num_devices=options.get("num_devices"))
        request = request.as_of(options.get("like"))
        return request.meshes[0], request.available_devices

    def _warn_of_many(self, call: Call) -> None:
        """Warn once if many plans are made for different values of arguments that are no arrays."""
        same_shapes = [key for key in self._known if call.differs_in(key) is not None]
        if len(same_shapes) == _MANY:
            warnings.warn(
                f"`{self.called.name}` is planned for the {_MANY + 1}th time with the same shapes, because"
                f" {call.differs_in(same_shapes[-1])} has changed: a plan holds for fixed values of the arguments that are no"
                " arrays. Leave it out of the arguments if the step does not need it, or make it an array",
                stacklevel=5,
            )
