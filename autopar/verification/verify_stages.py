"""Hold a plan of stages against the programs that XLA compiles from them.

In: a `PipelinePlan`, its program, hardware profiles. Out: `StagesVerification`: of each stage its program, with the loop
over microbatches that it was planned in, compiled for absent GPUs as that of any plan. Equal stages are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from autopar.cost.hardware_profile import HardwareProfile
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.step import stage_programs
from autopar.pipeline.schedule.in_flight import held_most
from autopar.system.text_tables import new_table, plain_text
from autopar.system.units import human_bytes, human_seconds
from autopar.transforms.program import Program
from autopar.verification.compile_plan import compile_plan, held_against, hosts_needed
from autopar.verification.verification import Verification, render_verification
from autopar.xla_compiler.compiler import Compiler


@dataclass(frozen=True, slots=True, repr=False)
class StagesVerification:
    """Predicted beside compiled, stage by stage. Printed, it is plain text.

    Args:
        stages: of each stage; equal stages have one in common.
        peak_bytes: of each submesh, what XLA's programs take with the microbatches that the schedule keeps in flight.
        budget_bytes: what a device of each submesh may hold.
        overhead_s: as of `Verification`.
    """

    plan: PipelinePlan
    stages: tuple[Verification, ...]
    peak_bytes: tuple[float, ...]
    budget_bytes: tuple[float, ...]
    overhead_s: float = 0.0

    @property
    def verified(self) -> tuple[Verification, ...]:
        """Those that differ."""
        return tuple({id(one): one for one in self.stages}.values())

    @property
    def off(self) -> tuple[str, ...]:
        """The names of the figures that are off, with their stage; empty where all hold."""
        names = [f"stage {n}: {name}" for n, one in enumerate(self.stages) for name in one.off]
        return tuple(names) if self.fits else (*names, "memory budget")

    @property
    def fits(self) -> bool:
        """Whether XLA's programs keep to the memory budget, with the microbatches in flight."""
        return all(peak <= budget for peak, budget in zip(self.peak_bytes, self.budget_bytes, strict=True))

    @property
    def holds(self) -> bool:
        """Whether every figure is within its tolerance."""
        return not self.off

    def __str__(self) -> str:
        return plain_text(lambda console: render_stages_verification(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything but the programs' texts, as JSON types: plain seconds and bytes."""
        return {
            "format": "autopar-stages-verification",
            "version": 1,
            "program": self.plan.program.name,
            "strategy": self.plan.words,
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
    """Compile the program of each stage for its GPUs, none of which need exist, and compare.

    Args:
        program: as traced. profiles: by kind of device.

    Raises:
        VerifyError: XLA refuses a program.
    """
    known: dict[Any, Verification] = {}
    stages: list[Verification] = []
    for number, (one, stage) in enumerate(zip(stage_programs(plan, program), plan.stages, strict=True)):
        profile = profiles[stage.submesh.shape.kind]
        planned = one.program.of(stage.plan)
        told = tuple(replace(constraint, at="") for constraint in stage.plan.constraints)
        key = (stage.plan.program.fingerprint, told, stage.plan.inputs, stage.plan.mesh, profile.name)
        if key not in known:
            compiled = compile_plan(
                stage.plan, planned, profile, hosts_needed(stage.plan, profile), compiler, _of_stage(report, number)
            )
            known[key] = held_against(
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
    held = held_most(schedule, lambda stage: plan.stages[stage].cost.flight_bytes)
    peaks, budgets = [], []
    for submesh, most in enumerate(held):
        own = schedule.stages_on(submesh)
        one_in_flight = max(plan.stages[stage].cost.flight_bytes for stage in own)
        state = sum(plan.stages[stage].cost.state_bytes for stage in own)
        works = max(stages[stage].compiled.peak_bytes - plan.stages[stage].cost.state_bytes for stage in own)
        peaks.append(state + works + max(0.0, most - one_in_flight))
        budgets.append(stages[own[0]].budget_bytes)
    return StagesVerification(plan, tuple(stages), tuple(peaks), tuple(budgets))


def _of_stage(report: Callable[[str, float], None], number: int) -> Callable[[str, float], None]:
    return lambda what, fraction: report(f"stage {number}: {what}", fraction)


def render_stages_verification(told: StagesVerification, console: Console) -> None:
    """Print a verification to a console: a row for each stage, and in full those that are off."""
    plan = told.plan
    verdict = "holds" if told.holds else f"off: {', '.join(told.off)}"
    console.print(Text.assemble(("Verification of ", "bold"), (plan.program.name, "bold"), f": {verdict}"))
    console.print(Text(f"{plan.words}\n"))
    numbers = ["peak predicted", "compiled", "collectives", "compiled in"]
    table = new_table("stage", *numbers, "", right=numbers)
    for number, one in enumerate(told.stages):
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
    for number, (peak, budget) in enumerate(zip(told.peak_bytes, told.budget_bytes, strict=True)):
        over = Text("OVER" if peak > budget else "", "red")
        table.add_row(str(number), human_bytes(peak), human_bytes(budget), over)
    title = f"With the microbatches in flight that {plan.schedule} keeps, per device"
    console.print(Text(title, "bold"), Padding(table, (0, 0, 1, 2)))
    for one in told.verified:
        if not one.holds:
            console.print(Text(f"Stage {told.stages.index(one)}", "bold"))
            render_verification(one, console)
