"""The plans of one step: found again by what they were made for, given, or made, once for all processes.

In: a step, its options or a given plan; a call of it. Out: `Planned`: the plan, the traced program that goes with it,
and what the step's result is beside its arrays.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh

from autopar import execute, plan_cache, planner
from autopar.compiled_cache import compiled_kept_in
from autopar.errors import PlanMismatchError
from autopar.front_ends.call import Call, Results
from autopar.front_ends.step import Step
from autopar.layouts import options_like
from autopar.mesh import MeshShape
from autopar.plan import Plan
from autopar.processes.agreement import agreed_plan, with_hosts
from autopar.processes.exchange import among_processes
from autopar.program import Program, program_of_call

#: After how many plans for the same shapes a user is told of it.
_MANY = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, what it was made for, and what the step's result is beside its arrays."""

    plan: Plan
    program: Program
    results: Results


class StepPlans:
    """The plans of one step.

    Args:
        called: the step. fixed: a plan to run by instead of making one.
        options: of `autopar.plan`; `like` may be another step's plans.
    """

    def __init__(self, called: Step, fixed: Plan | None, options: Mapping[str, Any]) -> None:
        self.called, self.fixed = called, fixed
        like = options.get("like")
        shared = (
            {k: v for k, v in like.options.items() if k in ("mesh", "hardware")} if isinstance(like, StepPlans) else {}
        )
        self.options: dict[str, Any] = shared | dict(options)  # on its devices, unless others are given
        self.latest: Plan | None = None  # made or used last
        self._known: dict[Any, Planned] = {}  # by what a plan is made for

    def of(self, call: Call, *, to_run: bool = False) -> Planned:
        """The plan of a call.

        Args:
            to_run: whether the devices it is for must be here.

        Raises:
            AutoparError: one of its subclasses, naming what to change.
        """
        if call.key not in self._known:
            self._warn_of_many(call)
            plan, program = self._made(call, to_run)
            assert call.results is not None, "it has been traced"
            self._known[call.key] = Planned(plan, program, call.results)
        self.latest = self._known[call.key].plan
        return self._known[call.key]

    def mesh(self, plan: Plan) -> Mesh:
        """The devices that a plan runs on."""
        given = self.options.get("mesh")
        return given if isinstance(given, Mesh) else execute.make_mesh(plan.mesh)

    def planning_options(self) -> dict[str, Any]:
        """The options as `plan_program` takes them: without those that tracing has used, `like` as a plan.

        Raises:
            PlanMismatchError: `like` is a step that has no plan yet.
        """
        used = ("carry", "donate", "static_argnames")
        options: dict[str, Any] = {"cache": True} | {n: v for n, v in self.options.items() if n not in used}
        like = options.get("like")
        if isinstance(like, StepPlans):
            if like.latest is None:
                raise PlanMismatchError(
                    f"`{self.called.name}` is to be laid out like `{like.called.name}`, which has no plan yet: call that"
                    " first, or its `init` or `plan`"
                )
            options["like"] = like.latest
        return options

    def compiled_kept(self, plan: Plan) -> AbstractContextManager[None]:
        """While entered, what is compiled for a plan is kept on disk, and looked for there."""
        folder = plan_cache.folder_of(self.options.get("cache", True))
        return compiled_kept_in(folder and folder / "compiled" / plan.program.fingerprint)

    # -- inside ------------------------------------------------------------------------------

    def _made(self, call: Call, to_run: bool) -> tuple[Plan, Program]:
        def traced() -> Program:
            if to_run and not isinstance(self.options.get("mesh"), Mesh):
                execute.check_devices(self._mesh_shape(), jax.devices())  # before the time it takes to plan
            return program_of_call(call, carry=self.options.get("carry"), donate=self.options.get("donate"))

        def planned(program: Program) -> Plan:
            options = self.planning_options()
            if exchange is not None and self._mesh_shape().num_devices == jax.device_count():
                options["hardware"] = with_hosts(options.get("hardware"))
            return planner.plan_program(program, **options)

        exchange = among_processes()
        if exchange is not None:
            options = self.options | ({} if self.fixed is not None else self.planning_options())
            agreed = agreed_plan(exchange, self.called.name, traced, planned, options, self.fixed)
            return agreed if self.fixed is None else self._held(self.fixed, agreed[1])
        program = traced()
        if self.fixed is not None:
            return self._held(self.fixed, program)
        plan = planned(program)
        return plan, program.of(plan)

    def _held(self, fixed: Plan, program: Program) -> tuple[Plan, Program]:
        """A given plan, held against the program."""
        program = program.of(fixed)
        difference = fixed.program.difference(program.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"the given plan was made for another program than `{self.called.name}` with these arguments:"
                f" {difference}. Plan again, or call with what it was made for."
            )
        trees = {"in_tree": program.trace.in_tree, "out_tree": program.trace.out_tree}  # not in the file
        return dataclasses.replace(fixed, **trees), program

    def _mesh_shape(self) -> MeshShape:
        """Of the mesh it runs on; or one of as many devices, where the planner chooses."""
        if self.fixed is not None:
            return self.fixed.mesh
        options = self.planning_options()
        if options.get("like") is not None:
            options = options_like(options["like"], options)
        return planner.asked_meshes(options.get("mesh"), options.get("num_devices"))[0]

    def _warn_of_many(self, call: Call) -> None:
        """Say it once, where plan after plan is made for other values of what is no array."""
        alike = [key for key in self._known if call.differs_in(key) is not None]
        if len(alike) == _MANY:
            warnings.warn(
                f"`{self.called.name}` is planned for the {_MANY + 1}th time with the same shapes, because"
                f" {call.differs_in(alike[-1])} is not what it was: what is no array is part of what a plan is made for."
                " Leave it out of the arguments if the step does not need it, or make it an array",
                stacklevel=5,
            )
