"""Verify a plan with pipeline stages: compile each stage's program by XLA, and compare it with the stage's plan.

In: a `PipelinePlan`, its program, hardware profiles. Out: `StagesVerification`. Each stage is compiled with the
microbatch loop that it was planned in. Equal stages are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.step import stage_programs
from autopar.pipeline.schedule.in_flight import peak_held
from autopar.system.text_tables import new_table, plain_text
from autopar.system.units import human_bytes, human_seconds
from autopar.transforms.program import Program
from autopar.verification.compile_plan import compare_with_compiled, compile_plan, hosts_needed
from autopar.verification.verification import Verification, render_verification
from autopar.xla_compiler.compiler import Compiler


@dataclass(frozen=True, slots=True, repr=False)
class StagesVerification:
    """Predicted and compiled figures of each stage. It prints as plain text.

    Args:
        plan: the verified plan.
        stages: verification of each stage; equal stages share one.
        peak_bytes: per submesh, peak memory of a device by XLA's programs, with the microbatches that the schedule
            keeps in flight.
        budget_bytes: per submesh, the memory budget of a device.
        overhead_s: as in `Verification`.
    """

    plan: PipelinePlan
    stages: tuple[Verification, ...]
    peak_bytes: tuple[float, ...]
    budget_bytes: tuple[float, ...]
    overhead_s: float = 0.0

    @property
    def verified(self) -> tuple[Verification, ...]:
        """The distinct verifications of stages."""
        return tuple({id(one): one for one in self.stages}.values())

    @property
    def off(self) -> tuple[str, ...]:
        """Names of the figures out of tolerance, with their stage; empty where all hold."""
        names = [f"stage {n}: {name}" for n, one in enumerate(self.stages) for name in one.off]
        return tuple(names) if self.fits else (*names, "memory budget")

    @property
    def fits(self) -> bool:
        """Whether XLA's programs fit the memory budget with the microbatches in flight."""
        return all(peak <= budget for peak, budget in zip(self.peak_bytes, self.budget_bytes, strict=True))

    @property
    def holds(self) -> bool:
        """Whether every figure is within its tolerance."""
        return not self.off

    def __str__(self) -> str:
        return plain_text(lambda console: render_stages_verification(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything but the HLO texts, as JSON types, in seconds and bytes."""
        return {
            "format": "autopar-stages-verification",
            "version": 1,
            "program": self.plan.program.name,
            "strategy": self.plan.strategy,
            "holds": self.holds,
            "off": list(self.off),
            "peak_bytes": list(self.peak_bytes),
            "budget_bytes": list(self.budget_bytes),
            "stages": [one.to_json() for one in self.stages],
        }


def verify_stages(
    plan: PipelinePlan,
    program: Program,
    profiles: Mapping[str, HardwareProfile],
    compiler: Compiler,
    report: Callable[[str, float], None],
) -> StagesVerification:
    """Compile the program of each stage for its GPUs, which may be absent, and compare it with the stage's plan.

    Args:
        program: the traced program.
        profiles: hardware profile of each kind of device.
        report: progress callback: stage, and its completed fraction.

    Raises:
        VerifyError: XLA fails to compile a program.
    """
    known: dict[Any, Verification] = {}
    stages: list[Verification] = []
    for number, (one, stage) in enumerate(zip(stage_programs(plan, program), plan.stages, strict=True)):
        profile = profiles[stage.submesh.shape.kind]
        planned = one.program.of(stage.plan)
        constraints = tuple(replace(constraint, at="") for constraint in stage.plan.constraints)
        key = (stage.plan.program.fingerprint, constraints, stage.plan.inputs, stage.plan.mesh, profile.name)
        if key not in known:
            compiled = compile_plan(
                stage.plan, planned, profile, hosts_needed(stage.plan, profile), compiler, _of_stage(report, number)
            )
            known[key] = compare_with_compiled(
                stage.plan,
                planned,
                compiled,
                profile,
                hosts_needed(stage.plan, profile),
                budget_bytes=profile.usable_bytes if plan.memory_budget_bytes is None else plan.memory_budget_bytes,
                attempts=(),
                overhead_s=0.0,
            )
        stages.append(known[key])
    schedule = plan.tasks()
    in_flight = peak_held(schedule, lambda stage: plan.stages[stage].cost.flight_bytes)
    peaks, budgets = [], []
    for submesh, most in enumerate(in_flight):
        own = schedule.stages_on(submesh)
        one_in_flight = max(plan.stages[stage].cost.flight_bytes for stage in own)
        state = sum(plan.stages[stage].cost.state_bytes for stage in own)
        works = max(stages[stage].compiled.peak_bytes - plan.stages[stage].cost.state_bytes for stage in own)
        peaks.append(state + works + max(0.0, most - one_in_flight))
        budgets.append(stages[own[0]].budget_bytes)
    return StagesVerification(plan, tuple(stages), tuple(peaks), tuple(budgets))


def _of_stage(report: Callable[[str, float], None], number: int) -> Callable[[str, float], None]:
    return lambda what, fraction: report(f"stage {number}: {what}", fraction)


def render_stages_verification(verification: StagesVerification, console: Console) -> None:
    """Print a verification to a console: one row per stage, and the full report of stages out of tolerance."""
    plan = verification.plan
    verdict = "holds" if verification.holds else f"off: {', '.join(verification.off)}"
    console.print(Text.assemble(("Verification of ", "bold"), (plan.program.name, "bold"), f": {verdict}"))
    console.print(Text(f"{plan.strategy}\n"))
    numbers = ["peak predicted", "compiled", "collectives", "compiled in"]
    table = new_table("stage", *numbers, "", right=numbers)
    for number, one in enumerate(verification.stages):
        table.add_row(
            Text(f"{number}: {one.plan.mesh.describe()}"),
            human_bytes(one.plan.prediction.peak_bytes),
            human_bytes(one.compiled.peak_bytes),
            str(sum(match.compiled_count for match in one.collectives)),
            human_seconds(one.compiled.compile_s),
            Text("" if one.holds else f"OFF: {', '.join(one.off)}", "red"),
        )
    console.print(Text("Each stage with one microbatch, per device", "bold"), Padding(table, (0, 0, 1, 2)))
    numbers = ["peak", "memory budget"]
    table = new_table("submesh", *numbers, "", right=numbers)
    for number, (peak, budget) in enumerate(zip(verification.peak_bytes, verification.budget_bytes, strict=True)):
        over = Text("OVER" if peak > budget else "", "red")
        table.add_row(str(number), human_bytes(peak), human_bytes(budget), over)
    title = f"With the microbatches in flight that {plan.schedule} keeps, per device"
    console.print(Text(title, "bold"), Padding(table, (0, 0, 1, 2)))
    for one in verification.verified:
        if not one.holds:
            console.print(Text(f"Stage {verification.stages.index(one)}", "bold"))
            render_verification(one, console)
