"""Verify a plan: compile it with XLA, without a GPU, and compare memory, collectives and step time with predictions.

In: a step, its arguments, a plan or the options to make one. Out: `Verification`, which prints as text. This process
traces, plans and lowers the step. A worker process (`xla_compiler`) compiles it. Only `run` executes the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import jax

from autopar.api.make_plan import plan_program
from autopar.api.parallel_step import ParallelStep
from autopar.api.parallelize import parallelize
from autopar.api.plan_in_stages import cluster_of
from autopar.errors import BudgetError, ClusterError, TimeLimitError, VerifyError
from autopar.frontend.step import Step
from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.request import requested_meshes, requested_profile
from autopar.plans.plan import Plan
from autopar.system.units import human_bytes
from autopar.transforms.program import Program
from autopar.verification.compile_plan import compare_with_compiled, compile_plan, hosts_needed
from autopar.verification.verification import Attempt, Verification
from autopar.verification.verify_stages import StagesVerification, verify_stages
from autopar.xla_compiler.compiler import CompiledStep, Compiler
from autopar.xla_compiler.gpu_target import gpus_per_host

#: The most replanning attempts for a plan whose compiled program exceeds the memory budget.
MOST_REPLANS = 2


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan and its compiled step."""

    plan: Plan
    compiled: CompiledStep


@overload
def verify(  # pyright: ignore[reportOverlappingOverload]
    step: Callable[..., Any], *args: Any, plan: PipelinePlan, **options: Any
) -> StagesVerification: ...
@overload
def verify(step: Callable[..., Any], *args: Any, everything: Literal["auto"], **options: Any) -> Any: ...
@overload
def verify(step: Callable[..., Any], *args: Any, stages: int | Literal["auto"], **options: Any) -> Any: ...
@overload
def verify(step: Callable[..., Any], *args: Any, **options: Any) -> Verification: ...
def verify(
    step: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    plan: AnyPlan | str | Path | None = None,
    hosts: int | None = None,
    run: bool = False,
    compiler: Compiler | None = None,
    **options: Any,
) -> Any:
    """Compile the planned step for its GPUs, which may be absent, and compare the result with the plan.

    If the compiled program exceeds the memory budget, a plan made here is replaced by one for a tighter budget, at most
    twice. A plan with pipeline stages has every stage's program compiled and returns `StagesVerification`.

    Args:
        step: a function, see `autopar.plan`; or a step made by `autopar.parallelize`, whose plan and options apply
            unless others are given.
        args: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
        kwargs: keyword arguments of the step.
        plan: the plan to verify; by default one is made.
        hosts: number of hosts; by default the fewest that hold the devices.
        run: whether to run and measure the step on local GPUs too.
        compiler: a running compiler, which stays open; by default one is started and closed here.
        options: options of `autopar.plan`. With `plan`, `hardware` is the target of the compile.

    Raises:
        VerifyError: the CUDA wheels or, with `run`, the GPUs are missing; or XLA fails to compile the program.
        AutoparError: as `autopar.plan` raises.
    """
    started = time.perf_counter()
    # The compiler starts before planning, which may take long, and is ready afterwards.
    with Compiler() if compiler is None else nullcontext(compiler) as compiler:
        if run:
            compiler.check_may_run()
        whole = step if isinstance(step, ParallelStep) and plan is None and not options else None
        if whole is not None:
            options = whole.options
        if whole is not None and (hosts is None or whole.is_fixed):
            parallel = whole
        else:
            if hosts is not None and plan is None:
                options = _spread(options, hosts)
            parallel = parallelize(Step.of(step), plan=plan, **options)
        verification = _Verifier(parallel, args, kwargs or {}, hosts, run, options, compiler).verify()
    return replace(verification, overhead_s=time.perf_counter() - started - verification.overhead_s)


class _Verifier:
    """Plans, compiles, and replans while the compiled program exceeds the budget."""

    def __init__(
        self,
        parallel: ParallelStep,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hosts: int | None,
        run: bool,
        options: Mapping[str, Any],
        compiler: Compiler,
    ) -> None:
        self.parallel, self.args, self.kwargs, self.hosts, self.run = parallel, args, kwargs, hosts, run
        self.options, self.compiler = options, compiler
        self.report: Callable[[str, float], None] = options.get("progress") or (lambda stage, fraction: None)
        self.excluded_s = 0.0  # seconds of planning and of XLA, which are no overhead of verification
        self.attempts: list[Attempt] = []

    def verify(self) -> Verification | StagesVerification:
        """The verification, with `overhead_s` set to the time that is no overhead; the caller subtracts it."""
        before = time.perf_counter()
        plan, program = self.parallel.planned(*self.args, **self.kwargs)
        self.excluded_s += time.perf_counter() - before
        if isinstance(plan, PipelinePlan):
            return self._of_stages(plan, program)
        profile = _profile(self.options.get("hardware"), plan)
        budget = profile.usable_bytes if plan.memory_budget_bytes is None else plan.memory_budget_bytes
        made, planned_for = _Made(plan, self._compile(plan, program, profile)), MemoryBudget(budget).plan_bytes
        self._note(made, planned_for)
        while made.compiled.peak_bytes > budget and not self.parallel.is_fixed and len(self.attempts) <= MOST_REPLANS:
            # A plan for this limit meets the budget if its prediction is off by the same factor.
            limit = made.plan.prediction.peak_bytes * budget / made.compiled.peak_bytes
            replanned = self._replan(made, program, limit)
            if replanned is None:
                break
            other = _Made(replanned, self._compile(replanned, program, profile))
            self._note(other, MemoryBudget(limit).plan_bytes)
            made = min(made, other, key=lambda one: one.compiled.peak_bytes)
        return compare_with_compiled(
            made.plan,
            program,
            made.compiled,
            profile,
            self._num_hosts(made.plan, profile),
            budget_bytes=budget,
            attempts=self.attempts,
            overhead_s=self.excluded_s,
        )

    def _of_stages(self, plan: PipelinePlan, program: Program) -> StagesVerification:
        if self.run:
            raise VerifyError(
                f"the plan of `{plan.program.name}` has {len(plan.stages)} stages, but `run` runs a single program;"
                " leave out --run (run=True)"
            )
        verification = verify_stages(plan, program, self.parallel.profiles(plan), self.compiler, self.report)
        self.excluded_s += verification.compile_s
        return replace(verification, overhead_s=self.excluded_s)

    def _num_hosts(self, plan: Plan, profile: HardwareProfile) -> int:
        if self.hosts is None:
            return hosts_needed(plan, profile)
        available = plan.available_devices or plan.num_devices
        return -(-self.hosts * plan.num_devices // available)

    def _compile(self, plan: Plan, program: Program, profile: HardwareProfile) -> CompiledStep:
        hosts = self._num_hosts(plan, profile)
        compiled = compile_plan(plan, program.of(plan), profile, hosts, self.compiler, self.report, run=self.run)
        self.excluded_s += compiled.compile_s
        return compiled

    def _replan(self, made: _Made, program: Program, limit: float) -> Plan | None:
        """A plan within a memory limit; None where there is none."""
        before = time.perf_counter()
        options = _of_one_kind(self.parallel.planning_options())
        own = {
            name: options[name] for name in options if name not in ("everything", "stages", "schedule", "partitioner")
        }
        try:
            plan = plan_program(program, **own | {"memory_budget_bytes": limit})
            assert isinstance(plan, Plan), "it has no stages"
        except (BudgetError, TimeLimitError) as error:
            self.attempts.append(
                Attempt(
                    planned_for_bytes=MemoryBudget(limit).plan_bytes,
                    predicted_bytes=None,
                    compiled_bytes=None,
                    step_time_s=None,
                    description=str(error).split(". Ways out")[0],
                )
            )
            return None
        finally:
            self.excluded_s += time.perf_counter() - before
        note = (
            f"planned for {human_bytes(MemoryBudget(limit).plan_bytes)} per device: XLA's program of a plan that predicted"
            f" {human_bytes(made.plan.prediction.peak_bytes)} took {human_bytes(made.compiled.peak_bytes)}"
        )
        return replace(plan, memory_budget_bytes=made.plan.memory_budget_bytes, notes=(*plan.notes, note))

    def _note(self, made: _Made, planned_for: float) -> None:
        self.attempts.append(
            Attempt(
                planned_for_bytes=planned_for,
                predicted_bytes=made.plan.prediction.peak_bytes,
                compiled_bytes=made.compiled.peak_bytes,
                step_time_s=made.plan.prediction.step_time_s,
                description=f"{made.plan.strategy}; mesh {made.plan.mesh}",
            )
        )


def _spread(options: Mapping[str, Any], hosts: int) -> dict[str, Any]:
    """The options with a hardware profile that has the devices per host that `hosts` gives.

    Raises:
        ClusterError: `hardware` names several kinds of devices.
    """
    options = _of_one_kind(options)
    given, mesh = options.get("num_devices"), options.get("mesh")
    if given is None:
        mesh = None if mesh is None else requested_meshes(mesh, None)[0]
        given = jax.device_count() if mesh is None else mesh.num_devices
    per_host = gpus_per_host(given, hosts)
    return {**options, "hardware": replace(requested_profile(options.get("hardware")), devices_per_host=per_host)}


def _of_one_kind(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the number of devices of one kind, such as `{"h100-sxm": 8}`, as `num_devices`.

    Raises:
        ClusterError: `hardware` names several kinds of devices.
    """
    given = options.get("hardware")
    if not isinstance(given, Mapping):
        return dict(options)
    if len(given) != 1:
        raise ClusterError(
            f"`hosts` spreads devices of one kind, but `hardware` names {', '.join(given) or 'none'}: leave `hosts` out"
        )
    (cluster, profiles) = cluster_of(given, options.get("num_devices"))
    return {**options, "hardware": next(iter(profiles.values())), "num_devices": cluster.num_devices}


def _profile(given: Any, plan: Plan) -> HardwareProfile:
    kind = next(iter(given)) if isinstance(given, Mapping) else given
    return requested_profile(kind or plan.hardware)
