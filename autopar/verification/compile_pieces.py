"""Compile the pieces of a pipelined step for its GPUs, which may be absent, as the executor would.

In: a `PipelinePlan`, its program, hardware profiles, a compiler.
Out: `CompiledStages`: of each stage, its compiled pieces with their replays. The executor itself is built, for stand-ins of
the devices, and gone through with types (`pipeline.run`). Equal pieces are compiled once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.hardware.profile import HardwareProfile
from autopar.jax_interop.absent_devices import absent_devices
from autopar.jax_interop.compilation import module_bytes
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.abstract_run import PieceRuns, run_on_types
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.step import PipelinedStep
from autopar.runtime.xla_options import compiler_options
from autopar.transforms.program import Program
from autopar.verification.compile_plan import hosts_needed
from autopar.verification.figures import compiled_collectives
from autopar.verification.step_times import replayed
from autopar.xla_compiler.compiler import CompiledStep, Compiler
from autopar.xla_compiler.gpu_target import gpus_per_slice, target_text, topology_text
from autopar.xla_compiler.hlo_collectives import Collective
from autopar.xla_compiler.hlo_text import parse_module
from autopar.xla_replay.replay import Replay


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """One program of a piece, as XLA compiled it. It has the properties of `abstract_run.CompiledProgram`.

    Args:
        replay: its replay; None where `no_replay` says why.
    """

    step: CompiledStep
    replay: Replay | None
    no_replay: str
    collectives: tuple[Collective, ...]

    @property
    def temp_bytes(self) -> float:
        return self.step.temp_bytes

    @property
    def output_bytes(self) -> float:
        return self.step.output_bytes

    @property
    def alias_bytes(self) -> float:
        return self.step.alias_bytes

    @property
    def output_shardings(self) -> tuple[str, ...]:
        assert self.step.output_shardings is not None, "the compiler returns them"
        return self.step.output_shardings


@dataclass(frozen=True, slots=True)
class CompiledStages:
    """The compiled pieces of a pipelined step.

    Args:
        pieces: of each stage.
        peak_bytes: of each submesh, per device, with the arrays that the executor holds.
    """

    pieces: tuple[tuple[PieceRuns, ...], ...]
    peak_bytes: tuple[float, ...]


def absent_pipeline(plan: PipelinePlan, program: Program, profiles: Mapping[str, HardwareProfile]) -> Pipeline:
    """What runs a plan, on stand-ins for its GPUs.

    Raises:
        PlanMismatchError: the plan was made by another version of autopar or for another program.
        HardwareError: a profile has no description of the GPU for XLA.
    """
    kinds: list[str] = []
    for group in plan.cluster.groups:
        target_text(profiles[group.kind])  # raises where it is no GPU that XLA compiles for
        kinds += [profiles[group.kind].device_kinds[0]] * group.num_devices
    return PipelinedStep(plan, program, absent_devices(kinds, "gpu", "cuda")).pipeline


def compile_pieces(
    plan: PipelinePlan,
    program: Program,
    profiles: Mapping[str, HardwareProfile],
    compiler: Compiler,
    report: Callable[[str, float], None],
) -> CompiledStages:
    """Compile every piece; the arguments are those of `verify_stages`.

    Raises:
        VerifyError: XLA fails to compile a piece.
        PlanMismatchError, HardwareError: see `absent_pipeline`.
    """
    pipeline = absent_pipeline(plan, program, profiles)
    known: dict[Any, CompiledPiece] = {}

    def compiled(stage: int, digest: str, lowered: jax.stages.Lowered) -> CompiledPiece:
        planned = plan.stages[stage]
        profile, options = profiles[planned.submesh.shape.kind], compiler_options(planned.plan)
        num_devices, hosts = planned.plan.mesh.num_devices, hosts_needed(planned.plan, profile)
        key = (digest, profile.name, topology_text(profile, num_devices, hosts), json.dumps(options, sort_keys=True))
        if key not in known:
            report(f"stage {stage}: XLA compiles a piece", 1.0)
            step = compiler.compile(module_bytes(lowered), profile, num_devices, hosts, options=options)
            module = parse_module(step.hlo_text)
            replay, why = replayed(module, profile.rates_name, gpus_per_slice(profile, num_devices, hosts))
            known[key] = CompiledPiece(step, replay, why, tuple(compiled_collectives(module)))
        return known[key]

    found = run_on_types(pipeline, compiled)
    numbers = range(len(plan.stages))
    return CompiledStages(
        tuple(tuple(one for one in found.pieces if one.stage == number) for number in numbers),
        found.peak_bytes,
    )
