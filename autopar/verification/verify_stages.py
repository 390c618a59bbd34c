"""Verify a plan with pipeline stages: compile the pieces that the executor runs, and compare them with the plan.

In: a `PipelinePlan`, its program, hardware profiles. Out: `StagesVerification`: the times of tasks, predicted and
replayed; the step time by either; collectives of each stage; peak memory of each submesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.partition.cluster import submeshes_of
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.partition.step_time import staged_timeline
from autopar.pipeline.plan import PipelinePlan, StagePlan
from autopar.pipeline.run.abstract_run import PieceRuns
from autopar.pipeline.schedule.tasks import PHASES
from autopar.plans.plan import Plan
from autopar.system.text_tables import new_table, plain_text
from autopar.system.units import human_bytes, human_seconds
from autopar.transforms.program import Program
from autopar.verification.compile_pieces import CompiledStages, compile_pieces
from autopar.verification.compile_plan import hosts_needed
from autopar.verification.figures import (
    MEMORY_SLACK_BYTES,
    PEAK_TOLERANCE,
    STEP_TIME_TOLERANCE,
    CollectiveMatch,
    Collectives,
    Figure,
    as_json,
    match_compiled,
    names_off,
    sent_by,
)
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.gpu_target import topology_text

#: The field of `StageCost` that predicts each phase.
_PREDICTED_BY = {"forward": "forward_s", "backward": "backward_s", "input": "backward_s", "weight": "weight_s"}


@dataclass(frozen=True, slots=True)
class TaskTime:
    """The time of a task of a stage: predicted, and that of its compiled pieces by the replay.

    Args:
        phase: as in `Task`; the pieces around the microbatch loop are the update.
        count: tasks in a step.
        replayed_s: None where a piece could not be replayed.
    """

    phase: str
    count: int
    predicted_s: float
    replayed_s: float | None

    @property
    def off(self) -> float | None:
        """(predicted - replayed) / replayed; None where there is no replayed time."""
        return (self.predicted_s - self.replayed_s) / self.replayed_s if self.replayed_s else None


@dataclass(frozen=True)
class StageVerification:
    """One stage.

    Args:
        plan: the stage's plan, with its collectives as the executor runs them.
        pieces: its compiled pieces, in the order in which they first run.
        times: its tasks.
        matched: its collectives in a step, predicted and compiled.
        topology: as in `Verification`.
    """

    plan: Plan
    pieces: tuple[PieceRuns, ...]
    times: tuple[TaskTime, ...]
    matched: Collectives
    topology: str

    @property
    def collectives(self) -> tuple[CollectiveMatch, ...]:
        """Collectives by kind and mesh axes, the largest first."""
        return self.matched.matches

    @property
    def off(self) -> tuple[str, ...]:
        """Names of its figures out of tolerance."""
        return names_off([match.figure for match in self.collectives])

    @property
    def compile_s(self) -> float:
        """Seconds of XLA's compiles of its pieces, also of those that other pieces share."""
        return sum(one.compiled.step.compile_s for piece in self.pieces for one in piece.links)

    @property
    def no_replay(self) -> str:
        """Why a piece could not be replayed; empty where all were."""
        return next(
            (one.compiled.no_replay for piece in self.pieces for one in piece.links if not one.compiled.replay), ""
        )

    def replayed_cost(self, cost: StageCost) -> StageCost | None:
        """A stage's cost with the replayed times of its tasks; None where one could not be replayed."""
        known = {one.phase: one.replayed_s for one in self.times}
        seconds = [known.get(phase, 0.0) for phase in ("forward", "backward", "input", "weight", "update")]
        forward, backward, of_input, weight, update = seconds
        if forward is None or backward is None or of_input is None or weight is None or update is None:
            return None
        return replace(cost, forward_s=forward, backward_s=backward + of_input, weight_s=weight, update_s=update)


@dataclass(frozen=True, repr=False)
class StagesVerification:
    """Predicted and compiled figures of a plan with stages. It prints as plain text.

    Args:
        plan: the verified plan.
        stages: each stage.
        memory: per submesh, the peak memory of a device, predicted, and by XLA's programs and the arrays that the
            executor holds.
        budget_bytes: per submesh, the memory budget of a device.
        step_time: the simulated step time by predicted and by replayed times of tasks, under the same schedule.
        overhead_s: as in `Verification`.
    """

    plan: PipelinePlan
    stages: tuple[StageVerification, ...]
    memory: tuple[Figure, ...]
    budget_bytes: tuple[float, ...]
    step_time: Figure
    overhead_s: float = 0.0

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per submesh, the compiled peak memory of a device."""
        return tuple(figure.compiled or 0.0 for figure in self.memory)

    @property
    def off(self) -> tuple[str, ...]:
        """Names of the figures out of tolerance, with their stage or submesh; empty where all hold."""
        names = [f"stage {n}: {name}" for n, one in enumerate(self.stages) for name in one.off]
        names += names_off([*self.memory, self.step_time])
        return tuple(names) if self.fits else (*names, "memory budget")

    @property
    def fits(self) -> bool:
        """Whether XLA's programs and the arrays that the executor holds fit the memory budget."""
        return all(peak <= budget for peak, budget in zip(self.peak_bytes, self.budget_bytes, strict=True))

    @property
    def holds(self) -> bool:
        """Whether every figure is within its tolerance."""
        return not self.off

    @cached_property
    def compile_s(self) -> float:
        """Seconds of XLA's compiles."""
        pieces = (one.compiled for stage in self.stages for piece in stage.pieces for one in piece.links)
        return sum(one.step.compile_s for one in {id(one): one for one in pieces}.values())

    @property
    def median_off(self) -> float | None:
        """The median of |predicted - replayed| / replayed over the tasks of all stages; None without replayed tasks."""
        found = [abs(one.off) for stage in self.stages for one in stage.times if one.off is not None]
        return median(found) if found else None

    def __str__(self) -> str:
        return plain_text(lambda console: render_stages_verification(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything but the HLO texts, as JSON types, in seconds and bytes."""
        return {
            "format": "autopar-stages-verification",
            "version": 2,
            "program": self.plan.program.name,
            "strategy": self.plan.strategy,
            "holds": self.holds,
            "off": list(self.off),
            "peak_bytes": list(self.peak_bytes),
            "budget_bytes": list(self.budget_bytes),
            "memory": [as_json(figure) for figure in self.memory],
            "step_time": as_json(self.step_time),
            "median_off": self.median_off,
            "stages": [self._stage_json(number) for number in range(len(self.stages))],
        }

    def _stage_json(self, number: int) -> dict[str, Any]:
        stage = self.stages[number]
        figure = self.memory[self.plan.submesh_of[number]]
        replayed = [one.replayed_s for one in stage.times]
        total = None if None in replayed else sum(one.count * (one.replayed_s or 0.0) for one in stage.times)
        predicted = sum(one.count * one.predicted_s for one in stage.times)
        off = (*stage.off, *names_off([figure]))
        return {
            "program": stage.plan.program.name,
            "hardware": stage.plan.hardware,
            "mesh": stage.plan.mesh.size_of,
            "topology": stage.topology,
            "strategy": stage.plan.strategy,
            "compile_s": stage.compile_s,
            "holds": not off,
            "off": list(off),
            "memory": [as_json(figure)],
            "step_time": as_json(Figure("all tasks", "s", predicted, total, None)),
            "step_times": {
                "rows": [
                    [f"{one.phase} x{one.count}", one.predicted_s, one.replayed_s, None, None] for one in stage.times
                ]
            },
            "collectives": [{**asdict(match), "holds": match.figure.holds} for match in stage.collectives],
            "pieces": [self._piece_json(stage, piece) for piece in stage.pieces],
        }

    def _piece_json(self, stage: StageVerification, piece: PieceRuns) -> dict[str, Any]:
        steps = [one.compiled.step for one in piece.links]
        return {
            "name": piece.name,
            "phase": piece.phase,
            "runs": piece.count,
            "digests": [one.digest for one in piece.links],
            "replayed_s": _replayed_s(piece),
            "argument_bytes": max(one.argument_bytes for one in steps),
            "temp_bytes": max(one.temp_bytes for one in steps),
            "output_bytes": max(one.output_bytes for one in steps),
            "alias_bytes": max(one.alias_bytes for one in steps),
            "collectives": _num_collectives(piece),
            "sent_bytes": _sent_bytes(piece, stage.plan),
            "compile_s": sum(one.compile_s for one in steps),
        }


def verify_stages(
    plan: PipelinePlan,
    program: Program,
    profiles: Mapping[str, HardwareProfile],
    compiler: Compiler,
    report: Callable[[str, float], None],
) -> StagesVerification:
    """Compile the pieces of each stage for its GPUs, which may be absent, and compare them with the plan.

    Args:
        program: the traced program.
        profiles: hardware profile of each kind of device.
        report: progress callback: what is done, and its completed fraction.

    Raises:
        VerifyError: XLA fails to compile a program.
        PlanMismatchError: the plan was made by another version of autopar or for another program.
        HardwareError: a profile has no description of the GPU for XLA.
    """
    compiled = compile_pieces(plan, program, profiles, compiler, report)
    stages = tuple(_stage(plan, number, compiled, profiles) for number in range(len(plan.stages)))
    kinds = {number: plan.stages[stage].submesh.shape.kind for stage, number in enumerate(plan.submesh_of)}
    budgets = [
        profiles[kinds[n]].usable_bytes if plan.memory_budget_bytes is None else plan.memory_budget_bytes
        for n in range(len(kinds))
    ]
    memory = [
        Figure(f"peak of submesh {n}", "bytes", predicted, peak, PEAK_TOLERANCE, MEMORY_SLACK_BYTES)
        for n, (predicted, peak) in enumerate(zip(plan.prediction.stage_bytes, compiled.peak_bytes, strict=True))
    ]
    return StagesVerification(plan, stages, tuple(memory), tuple(budgets), _step_time(plan, stages))


def _stage(
    plan: PipelinePlan, number: int, compiled: CompiledStages, profiles: Mapping[str, HardwareProfile]
) -> StageVerification:
    pieces, stage = compiled.pieces[number], plan.stages[number]
    planned = stage.plan
    profile = profiles[stage.submesh.shape.kind]
    hosts = hosts_needed(planned, profile)
    found = [
        replace(one, num_times=one.num_times * _runs_of_device(piece, stage))
        for piece in pieces
        for link in piece.links
        for one in link.compiled.collectives
    ]
    of_hosts = next((link.compiled.step.hosts for piece in pieces for link in piece.links), ())
    return StageVerification(
        planned,
        pieces,
        _times(stage, pieces, plan.num_microbatches),
        match_compiled(planned, found, of_hosts),
        topology_text(profile, planned.mesh.num_devices, hosts),
    )


def _runs_of_device(piece: PieceRuns, stage: StagePlan) -> int:
    """How often a device runs a piece, if the microbatches of all replicas count: each replica runs the update."""
    return max(1, piece.count // len(stage.places)) if piece.phase == "update" else piece.count


def _times(stage: StagePlan, pieces: Sequence[PieceRuns], num_microbatches: int) -> tuple[TaskTime, ...]:
    """The tasks of a stage, on all its replicas."""
    times: list[TaskTime] = []
    for phase in PHASES:
        own = [piece for piece in pieces if piece.phase == phase]
        if not own:
            continue
        count = len(stage.places) if phase == "update" else num_microbatches
        each = [_replayed_s(piece) for piece in own]
        known = [piece.count * (seconds or 0.0) for piece, seconds in zip(own, each, strict=True)]
        replayed = None if None in each else sum(known) / count
        times.append(TaskTime(phase, count, getattr(stage.cost, _PREDICTED_BY.get(phase, "update_s")), replayed))
    return tuple(times)


def _step_time(plan: PipelinePlan, stages: Sequence[StageVerification]) -> Figure:
    """The simulated step time by predicted and by replayed times."""
    costs = [one.replayed_cost(stage.cost) for one, stage in zip(stages, plan.stages, strict=True)]
    known = [cost for cost in costs if cost is not None]
    replayed = None
    if len(known) == len(costs):
        streamed = plan.streamed(known)
        timeline = staged_timeline(plan.tasks(), known, plan.sends, submeshes_of(plan.stages))
        replayed = timeline.makespan_s if streamed is None else streamed.step_s
    return Figure("step time", "s", plan.prediction.step_time_s, replayed, STEP_TIME_TOLERANCE)


def _replayed_s(piece: PieceRuns) -> float | None:
    """Seconds of one run of a piece by the replay; None where it could not be replayed."""
    replays = [one.compiled.replay for one in piece.links]
    return None if None in replays else sum(one.step_time_s for one in replays)


def _num_collectives(piece: PieceRuns) -> int:
    return sum(each.num_times for one in piece.links for each in one.compiled.collectives)


def _sent_bytes(piece: PieceRuns, plan: Plan) -> float:
    """Bytes that a device sends in one run of a piece, in collectives."""
    return sum(sent_by(each, plan.mesh) for one in piece.links for each in one.compiled.collectives)


# -- as text ---------------------------------------------------------------------------------


def render_stages_verification(verification: StagesVerification, console: Console) -> None:
    """Print a verification to a console: a row per task, piece and submesh, and the collectives out of tolerance."""
    plan = verification.plan
    verdict = "holds" if verification.holds else f"off: {', '.join(verification.off)}"
    console.print(Text.assemble(("Verification of ", "bold"), (plan.program.name, "bold"), f": {verdict}"))
    console.print(
        Text(
            f"{plan.strategy}; the pieces that the executor runs, compiled for {plan.hardware} in"
            f" {human_seconds(verification.compile_s)}, and {human_seconds(verification.overhead_s)} around it\n"
        )
    )
    console.print(Text("Times of tasks", "bold"), _tasks(verification))
    console.print(Text("Compiled pieces, per device and run", "bold"), _pieces(verification))
    console.print(Text("Peak memory with everything the executor holds, per device", "bold"), _memory(verification))
    for number, stage in enumerate(verification.stages):
        if stage.collectives:
            console.print(Text(f"Collectives of stage {number}: what one device sends in a step", "bold"))
            console.print(_collectives(stage))


def _tasks(verification: StagesVerification) -> RenderableType:
    numbers = ["runs", "predicted", "replayed", "off"]
    table = new_table("stage", "task", *numbers, "", right=numbers)
    for number, stage in enumerate(verification.stages):
        for one in stage.times:
            replayed = "-" if one.replayed_s is None else human_seconds(one.replayed_s)
            name = f"{number}: {stage.plan.mesh.describe()}" if one is stage.times[0] else ""
            table.add_row(
                Text(name), one.phase, str(one.count), human_seconds(one.predicted_s), replayed, _off(one.off)
            )
        if stage.no_replay:
            table.add_row("", Text(f"not replayed: {stage.no_replay}"))
    figure = verification.step_time
    replayed = "-" if figure.compiled is None else human_seconds(figure.compiled)
    is_off = Text("" if figure.holds else "OFF", "red")
    table.add_row("step", "", "1", human_seconds(figure.predicted), replayed, _off(figure.off), is_off)
    return Padding(table, (0, 0, 1, 2))


def _pieces(verification: StagesVerification) -> RenderableType:
    numbers = ["runs", "replayed", "inputs", "temporaries", "outputs", "collectives", "sends"]
    table = new_table("stage", "piece", *numbers, right=numbers)
    for number, stage in enumerate(verification.stages):
        for piece in stage.pieces:
            seconds, steps = _replayed_s(piece), [one.compiled.step for one in piece.links]
            table.add_row(
                str(number) if piece is stage.pieces[0] else "",
                piece.name,
                str(piece.count),
                "-" if seconds is None else human_seconds(seconds),
                *(
                    human_bytes(max(getattr(step, name) for step in steps))
                    for name in ("argument_bytes", "temp_bytes", "output_bytes")
                ),
                str(_num_collectives(piece)),
                human_bytes(_sent_bytes(piece, stage.plan)),
            )
    return Padding(table, (0, 0, 1, 2))


def _memory(verification: StagesVerification) -> RenderableType:
    numbers = ["predicted", "compiled", "off", "memory budget"]
    table = new_table("submesh", *numbers, "", right=numbers)
    for number, (figure, budget) in enumerate(zip(verification.memory, verification.budget_bytes, strict=True)):
        peak = figure.compiled or 0.0
        mark = "OVER" if peak > budget else "" if figure.holds else "OFF"
        sizes = [human_bytes(figure.predicted), human_bytes(peak), _off(figure.off), human_bytes(budget)]
        table.add_row(str(number), *sizes, Text(mark, "red"))
    return Padding(table, (0, 0, 1, 2))


def _collectives(stage: StageVerification) -> RenderableType:
    numbers = ["predicted", "compiled", "off"]
    table = new_table("collective", *numbers, "", right=numbers)
    for one in stage.collectives:
        table.add_row(
            Text(one.name),
            f"{one.predicted_count}{'*' if one.combinable else ''}: {human_bytes(one.predicted_bytes)}",
            f"{one.compiled_count}: {human_bytes(one.compiled_bytes)}",
            _off(one.figure.off),
            Text("" if one.figure.holds else "OFF", "red"),
        )
    return Padding(table, (0, 0, 1, 2))


def _off(off: float | None) -> str:
    return "-" if off is None else f"{100 * off:+.1f} %"
