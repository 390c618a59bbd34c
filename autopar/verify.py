"""Hold a plan against the program that XLA compiles from it, on a machine without a GPU.

In: a step, its arguments and a plan (or what to plan for). Out: `Verification`: predicted beside
compiled, which prints as text. The step is traced, planned and lowered here, and compiled in
another process (`absent`); nothing is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from autopar import execute
from autopar.absent import target_text, topology_text
from autopar.api import ParallelStep, parallelize
from autopar.compare import match_collectives, memory_figures, step_time_figure
from autopar.compiler import Arguments, CompiledStep, Compiler
from autopar.cost.hardware import HardwareProfile, detect, load
from autopar.errors import BudgetError, TimeLimitError
from autopar.front_ends.step import Step
from autopar.jax_compat import kept_inputs, module_bytes, raw_struct
from autopar.mesh import MeshShape, parse_mesh
from autopar.plan import Plan
from autopar.planner import Program, plan_program
from autopar.units import human_bytes
from autopar.verification import Attempt, Verification
from autopar.within_budget import BUDGET_MARGIN

#: How often a plan whose compiled program takes more than the memory budget is made anew.
MOST_REPLANS = 2


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan, what it was made for, and what XLA made of it."""

    plan: Plan
    compiled: CompiledStep


def verify(
    step: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    hosts: int | None = None,
    run: bool = False,
    compiler: Compiler | None = None,
    **options: Any,
) -> Verification:
    """Compile the planned step for its GPUs, none of which need exist, and compare.

    A plan made here whose compiled program takes more than the memory budget is made anew for a
    tighter one, at most twice.

    Args:
        step: a function as for `autopar.plan`, or a step made by `autopar.parallelize`, whose plan and
            options hold unless others are given.
        args: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
        kwargs: the step's keyword arguments.
        plan: the plan to hold against XLA's program; by default one is made.
        hosts: over how many hosts the devices are spread; by default as few as the profile needs.
        run: run the step too, on GPUs that are here, and measure it.
        compiler: one that was started earlier, and is ended by whoever started it; by default one is
            started here.
        options: those of `autopar.plan`. With `plan`, `hardware` says what to compile for.

    Raises:
        VerifyError: the CUDA wheels are missing, XLA refuses the program, or it is to be run and the GPUs
            are not here.
        AutoparError: as `autopar.plan` raises.
    """
    started = time.perf_counter()
    # Before planning, which may take long: it is getting ready meanwhile.
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
                options |= {"hardware": _spread(options, hosts)}
            parallel = parallelize(Step.of(step), plan=plan, **options)
        told = _Verifier(parallel, args, kwargs or {}, hosts, run, options, compiler).verify()
    return replace(told, overhead_s=time.perf_counter() - started - told.overhead_s)


class _Verifier:
    """Plans, compiles, and plans again where the compiled program takes more than the budget."""

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
        self.elsewhere_s = 0.0  # planning, and XLA's own work
        self.attempts: list[Attempt] = []

    def verify(self) -> Verification:
        """All but the overhead, in whose place stands what is no overhead."""
        before = time.perf_counter()
        plan, program = self.parallel.planned(*self.args, **self.kwargs)
        self.elsewhere_s += time.perf_counter() - before
        profile = _profile(self.options.get("hardware"), plan)
        budget = profile.usable_bytes if plan.memory_budget_bytes is None else plan.memory_budget_bytes
        made, planned_for = _Made(plan, self._compile(plan, program, profile)), budget * (1 - BUDGET_MARGIN)
        self._note(made, planned_for)
        while made.compiled.peak_bytes > budget and not self.parallel.is_fixed and len(self.attempts) <= MOST_REPLANS:
            # The next plan, if it is off as far as this one, takes just what the budget leaves.
            limit = made.plan.prediction.peak_bytes * budget / made.compiled.peak_bytes
            replanned = self._replan(made, program, limit)
            if replanned is None:
                break
            other = _Made(replanned, self._compile(replanned, program, profile))
            self._note(other, limit * (1 - BUDGET_MARGIN))
            made = min(made, other, key=lambda one: one.compiled.peak_bytes)
        plan, compiled = made.plan, made.compiled
        matched = match_collectives(plan, compiled.hlo_text, compiled.hosts)
        # V100 and A100 have no such figures, and XLA's estimate is not to be believed there.
        believable = "matrix_unit_description" in (profile.xla_target or {})
        return Verification(
            plan=plan,
            topology=topology_text(plan.mesh.num_devices, self._num_hosts(plan, profile)),
            memory=memory_figures(plan, _argument_bytes(plan, program), compiled),
            matched=matched,
            step_time=step_time_figure(plan, compiled, believable),
            compiled=compiled,
            budget_bytes=budget,
            attempts=tuple(self.attempts),
            overhead_s=self.elsewhere_s,
        )

    def _num_hosts(self, plan: Plan, profile: HardwareProfile) -> int:
        return -(-plan.mesh.num_devices // profile.devices_per_host) if self.hosts is None else self.hosts

    def _compile(self, plan: Plan, program: Program, profile: HardwareProfile) -> CompiledStep:
        num_hosts = self._num_hosts(plan, profile)
        topology_text(plan.mesh.num_devices, num_hosts)  # refused before lowering, as is
        target_text(profile)  # a profile without a GPU
        self.report("lower", 1.0)
        trace = program.of(plan).trace
        jitted = execute.jit_plan(plan, trace, execute.abstract_mesh(plan.mesh))
        lowered = execute.lower_for("cuda", jitted, trace.arguments)
        arguments = [_arguments(plan, program, kept_inputs(lowered))] if self.run else []
        self.report("XLA compiles", 1.0)
        compiled = self.compiler.compile(module_bytes(lowered), profile, plan.mesh.num_devices, num_hosts, *arguments)
        self.elsewhere_s += compiled.compile_s
        return compiled

    def _replan(self, made: _Made, program: Program, limit: float) -> Plan | None:
        """A plan of less memory; None where there is none."""
        before = time.perf_counter()
        planning = self.parallel.planning_options()
        planning["memory_budget_bytes"] = limit
        try:
            plan = plan_program(program, **planning)
        except (BudgetError, TimeLimitError) as error:
            self.attempts.append(
                Attempt(
                    planned_for_bytes=limit * (1 - BUDGET_MARGIN),
                    predicted_bytes=None,
                    compiled_bytes=None,
                    step_time_s=None,
                    words=str(error).split(". Ways out")[0],
                )
            )
            return None
        finally:
            self.elsewhere_s += time.perf_counter() - before
        note = (
            f"planned for {human_bytes(limit * (1 - BUDGET_MARGIN))} per device: XLA's program of a plan that predicted"
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
                words=f"{made.plan.words}; mesh {made.plan.mesh}",
            )
        )


def _spread(options: Mapping[str, Any], hosts: int) -> HardwareProfile:
    """The hardware to plan for, with as many devices a host as `hosts` leaves."""
    mesh = options.get("mesh")
    if mesh is None:
        num_devices = options.get("num_devices") or jax.device_count()
    elif isinstance(mesh, MeshShape):
        num_devices = mesh.num_devices
    else:
        num_devices = parse_mesh(mesh).num_devices if isinstance(mesh, str) else mesh.devices.size
    topology_text(num_devices, hosts)
    given = options.get("hardware")
    if given is None:
        device = jax.devices()[0]
        given = detect(device.device_kind, device.platform)
    profile = given if isinstance(given, HardwareProfile) else load(given)
    return replace(profile, devices_per_host=num_devices // hosts)


def _profile(given: Any, plan: Plan) -> HardwareProfile:
    return given if isinstance(given, HardwareProfile) else load(given or plan.hardware)


def _arguments(plan: Plan, program: Program, kept: Sequence[int]) -> Arguments:
    """What to run the step on: the inputs that the lowered program takes."""
    trace, place = program.trace, {position: n for n, position in enumerate(kept)}
    inputs = []
    for position in kept:
        raw, dims = raw_struct(trace.avals[trace.inputs[position]]), plan.inputs[position].sharding.dims
        inputs.append((tuple(raw.shape), str(raw.dtype), tuple(map(tuple, dims))))
    return Arguments(
        mesh_axes=plan.mesh.axis_names,
        mesh_sizes=plan.mesh.axis_sizes,
        inputs=tuple(inputs),
        donated=tuple(place[position] for position in plan.donated if position in place),
        carried=tuple((place[before], after) for before, after in plan.carried if before in place),
    )


def _argument_bytes(plan: Plan, program: Program) -> float:
    graph = program.graph
    read = {value for node in graph.nodes for value in node.operands} | set(graph.outputs)
    return sum(tensor.num_bytes for tensor, value in zip(plan.inputs, graph.inputs, strict=True) if value in read)
