"""Compile a planned program for present or absent GPUs, and compare the result with the plan.

In: a plan, its program, a hardware profile. Out: `CompiledStep`; `Verification`, the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.hardware.profile import HardwareProfile
from autopar.jax_interop.compat import raw_struct
from autopar.jax_interop.compilation import kept_inputs, module_bytes
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.xla_options import compiler_options
from autopar.transforms.program import Program
from autopar.verification.figures import match_collectives, memory_figures, step_time_figure
from autopar.verification.step_times import step_times
from autopar.verification.verification import Attempt, Verification
from autopar.xla_compiler.compiler import Arguments, CompiledStep, Compiler
from autopar.xla_compiler.gpu_target import gpus_per_slice, target_text, topology_text
from autopar.xla_compiler.hlo_text import parse_module


def compile_plan(
    plan: Plan,
    program: Program,
    profile: HardwareProfile,
    num_hosts: int,
    compiler: Compiler,
    report: Callable[[str, float], None],
    *,
    run: bool = False,
) -> CompiledStep:
    """Compile a planned program by XLA.

    Args:
        program: the program in the form that was planned.
        report: progress callback: stage, and its completed fraction.
        run: whether to run the program on local GPUs too.

    Raises:
        VerifyError: XLA fails to compile the program.
        MeshError: the devices do not divide evenly among the hosts.
        HardwareError: the profile has no description of the GPU for XLA.
    """
    topology_text(
        profile, plan.mesh.num_devices, num_hosts
    )  # raise errors of the topology and the profile before lowering
    target_text(profile)
    report("lower", 1.0)
    jitted = execute.jit_plan(plan, program.trace, execute.abstract_mesh(plan.mesh, profile))
    lowered = execute.lower_for("cuda", jitted, program.trace.arguments)
    arguments = [_arguments(plan, program, kept_inputs(lowered))] if run else []
    report("XLA compiles", 1.0)
    return compiler.compile(
        module_bytes(lowered), profile, plan.mesh.num_devices, num_hosts, *arguments, options=compiler_options(plan)
    )


def compare_with_compiled(
    plan: Plan,
    program: Program,
    compiled: CompiledStep,
    profile: HardwareProfile,
    num_hosts: int,
    *,
    budget_bytes: float,
    attempts: Sequence[Attempt],
    overhead_s: float,
) -> Verification:
    """Compare a plan with the compiled step; see `Verification`."""
    num_devices, has_tables = plan.mesh.num_devices, profile.xla_estimator is not None
    per_slice = gpus_per_slice(profile, num_devices, num_hosts)
    module = parse_module(compiled.hlo_text)
    times = step_times(plan, compiled, module, profile.rates_name, per_slice, has_tables=has_tables)
    return Verification(
        plan=plan,
        topology=topology_text(profile, num_devices, num_hosts),
        memory=memory_figures(plan, _argument_bytes(plan, program), compiled),
        matched=match_collectives(plan, module, compiled.hosts),
        times=times,
        step_time=step_time_figure(plan, times, has_tables),
        compiled=compiled,
        budget_bytes=budget_bytes,
        attempts=tuple(attempts),
        overhead_s=overhead_s,
    )


def hosts_needed(plan: Plan, profile: HardwareProfile) -> int:
    """The fewest hosts that hold the plan's devices."""
    return -(-plan.mesh.num_devices // profile.devices_per_host)


def _arguments(plan: Plan, program: Program, kept: Sequence[int]) -> Arguments:
    """The inputs of the lowered program, with `kept` positions in the traced program."""
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
    read = {*graph.users, *graph.outputs}
    return sum(tensor.num_bytes for tensor, value in zip(plan.inputs, graph.inputs, strict=True) if value in read)
