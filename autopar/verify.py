"""Hold a plan against the program that XLA compiles from it, on a machine without a GPU.

In: a step, its arguments and a plan (or what to plan for). Out: `Verification`: predicted beside
compiled, which prints as text. The step is traced, planned and lowered here, and compiled in
another process (`absent`); nothing is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar import execute
from autopar.absent import target_text, topology_text
from autopar.api import ParallelStep, parallelize
from autopar.compare import (
    CollectiveMatch,
    Collectives,
    CompiledCollective,
    Figure,
    as_json,
    match_collectives,
    memory_figures,
    names_off,
    step_time_figure,
)
from autopar.compiler import Arguments, CompiledStep, Compiler
from autopar.cost.hardware import HardwareProfile, detect, load
from autopar.errors import BudgetError, TimeLimitError
from autopar.explain import plain_text, short_source
from autopar.jax_compat import kept_inputs, module_bytes, raw_struct
from autopar.mesh import MeshShape, parse_mesh
from autopar.plan import Plan
from autopar.planner import Program, plan_program
from autopar.units import human_bytes, human_seconds
from autopar.within_budget import BUDGET_MARGIN

#: Rows shown of collectives that nobody predicted; the JSON has all.
MAX_ROWS = 16
#: Rows shown of compiled collectives one by one.
FEW_ROWS = 8
#: How often a plan whose compiled program takes more than the memory budget is made anew.
MOST_REPLANS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One plan that was compiled, or could not be made. Bytes are per device.

    Args:
        planned_for_bytes: what the plan was to keep to: the budget less the margin, or less after a
            plan that took more than the budget.
        predicted_bytes, compiled_bytes: the peak; None where no plan fits.
        step_time_s: predicted.
        words: the plan's, or why there is none.
    """

    planned_for_bytes: float
    predicted_bytes: float | None
    compiled_bytes: float | None
    step_time_s: float | None
    words: str


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan, what it was made for, and what XLA made of it."""

    plan: Plan
    compiled: CompiledStep


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """Predicted beside compiled. Printed, it is plain text.

    Args:
        plan: what was held against XLA's program.
        topology: `slices x hosts x GPUs` that it was compiled for.
        memory: arguments, temporaries, outputs, what these share, and the peak; bytes per device.
        matched: all collectives: by kind and mesh axes, and one by one with the decisions that
            predicted them.
        step_time: the plan's beside the estimate of XLA's scheduler.
        compiled: what XLA made, its text included.
        budget_bytes: the memory budget that the compiled peak must keep to.
        attempts: the plans that were made and compiled to keep to it, the verified one among them.
        overhead_s: what verifying took beyond planning (tracing included) and beyond XLA's compile:
            lowering the planned step, starting the compiler's process as far as planning did not
            hide it, handing over the module, reading XLA's program, comparing. Not in it: printing,
            and the text of the program, which XLA writes while it compiles.
    """

    plan: Plan
    topology: str
    memory: tuple[Figure, ...]
    matched: Collectives
    step_time: Figure
    compiled: CompiledStep
    budget_bytes: float
    attempts: tuple[Attempt, ...]
    overhead_s: float

    @property
    def collectives(self) -> tuple[CollectiveMatch, ...]:
        """By kind and mesh axes, the largest first."""
        return self.matched.matches

    @property
    def unpredicted(self) -> tuple[CompiledCollective, ...]:
        """Compiled collectives that no decision accounts for, the largest first."""
        return self.matched.unpredicted

    @property
    def off(self) -> tuple[str, ...]:
        """The names of the figures that are off by more than their tolerance, and `memory budget` where
        XLA's program takes more; empty where all hold."""
        names = names_off([*self.memory, *(match.figure for match in self.collectives), self.step_time])
        return names if self.fits else (*names, "memory budget")

    @property
    def fits(self) -> bool:
        """Whether XLA's program keeps to the memory budget."""
        return self.compiled.peak_bytes <= self.budget_bytes

    @property
    def holds(self) -> bool:
        """Whether every figure is within its tolerance."""
        return not self.off

    def __str__(self) -> str:
        return plain_text(lambda console: render_verification(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Everything but the program's text, as JSON types: plain seconds and bytes."""
        compiled = self.compiled
        return {
            "format": "autopar-verification",
            "version": 1,
            "program": self.plan.program.name,
            "hardware": self.plan.hardware,
            "mesh": dict(zip(self.plan.mesh.axis_names, self.plan.mesh.axis_sizes, strict=True)),
            "topology": self.topology,
            "strategy": self.plan.words,
            "xla_flags": list(compiled.flags),
            "compile_s": compiled.compile_s,
            "overhead_s": self.overhead_s,
            "holds": self.holds,
            "off": list(self.off),
            "memory": [as_json(figure) for figure in self.memory],
            "memory_budget": {
                "bytes": self.budget_bytes,
                "margin": BUDGET_MARGIN,
                "holds": self.fits,
                "attempts": [asdict(attempt) for attempt in self.attempts],
            },
            "step_time": as_json(self.step_time),
            "measured": asdict(compiled.measured) if compiled.measured else None,
            "predicted_exposed_s": self.plan.prediction.xla_exposed_s,
            "exposed_s": compiled.exposed_s,
            "collectives": [{**asdict(match), "holds": match.figure.holds} for match in self.collectives],
            "compiled_collectives": [
                asdict(one) | {"predicted": [self._predicted(position) for position in one.predicted]}
                for one in self.matched.compiled
            ],
            "unpredicted": [asdict(one) for one in self.unpredicted],
            "missing": [self._predicted(position) | {"missing_bytes": rest} for position, rest in self.matched.missing],
        }

    def _predicted(self, position: int) -> dict[str, Any]:
        use = self.plan.collectives[position]
        about = {name: getattr(use, name) for name in ("kind", "axes", "num_bytes", "cause", "path", "source", "phase")}
        return {"position": position, **about}


def verify(
    step: Callable[..., Any],
    *args: Any,
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
            function = step.__wrapped__ if isinstance(step, ParallelStep) else step  # type: ignore[attr-defined]
            if hosts is not None and plan is None:
                options |= {"hardware": _spread(options, hosts)}
            parallel = parallelize(function, plan=plan, **options)
        told = _Verifier(parallel, args, hosts, run, options, compiler).verify()
    return replace(told, overhead_s=time.perf_counter() - started - told.overhead_s)


class _Verifier:
    """Plans, compiles, and plans again where the compiled program takes more than the budget."""

    def __init__(
        self,
        parallel: ParallelStep,
        args: Sequence[Any],
        hosts: int | None,
        run: bool,
        options: Mapping[str, Any],
        compiler: Compiler,
    ) -> None:
        self.parallel, self.args, self.hosts, self.run = parallel, args, hosts, run
        self.options, self.compiler = options, compiler
        self.report: Callable[[str, float], None] = options.get("progress") or (lambda stage, fraction: None)
        self.elsewhere_s = 0.0  # planning, and XLA's own work
        self.attempts: list[Attempt] = []

    def verify(self) -> Verification:
        """All but the overhead, in whose place stands what is no overhead."""
        before = time.perf_counter()
        plan, program = self.parallel.planned(*self.args)
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
        jitted = execute.jit_plan(plan, program.of(plan).trace, execute.abstract_mesh(plan.mesh))
        lowered = execute.lower_for("cuda", jitted, self.args)
        arguments = [_arguments(plan, program, kept_inputs(lowered))] if self.run else []
        self.report("XLA compiles", 1.0)
        compiled = self.compiler.compile(module_bytes(lowered), profile, plan.mesh.num_devices, num_hosts, *arguments)
        self.elsewhere_s += compiled.compile_s
        return compiled

    def _replan(self, made: _Made, program: Program, limit: float) -> Plan | None:
        """A plan of less memory; None where there is none."""
        before = time.perf_counter()
        planning: dict[str, Any] = {k: v for k, v in self.options.items() if k not in ("carry", "donate")}
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


# -- as text ---------------------------------------------------------------------------------


def render_verification(told: Verification, console: Console) -> None:
    """Print a verification to a console, with styles where it has them."""
    plan, compiled = told.plan, told.compiled
    verdict = "holds" if told.holds else f"off: {', '.join(told.off)}"
    console.print(Text.assemble(("Verification of ", "bold"), (plan.program.name, "bold"), f": {verdict}"))
    console.print(Text(f"{plan.words}; mesh {plan.mesh.describe()}"))
    console.print(
        Text(
            f"compiled for {plan.hardware}, topology {told.topology}, in {human_seconds(compiled.compile_s)}, and"
            f" {human_seconds(told.overhead_s)} around it\n"
        )
    )
    console.print(Text("Memory, per device", "bold"), _figures(told.memory))
    console.print(_budget(told))
    console.print(Text("Collectives: what one device sends in a step", "bold"))
    console.print(_collectives(told.collectives) if told.collectives else Padding(Text("none\n"), (0, 0, 0, 2)))
    if told.matched.compiled:
        console.print(Text("Compiled collectives, and what predicted them", "bold"), _one_by_one(told))
    if told.unpredicted:
        console.print(Text("Compiled, and predicted by no decision", "bold"), _strangers(told.unpredicted))
    if told.matched.missing:
        console.print(Text("Predicted, and not compiled", "bold"), _missing(told))
    console.print(Text("Step time, and XLA's estimate of it", "bold"), _figures([told.step_time]))
    foreseen = plan.prediction.xla_exposed_s
    for whose, times in (("predicted", foreseen), ("says XLA", compiled.exposed_s)):
        if times is not None:
            each = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in times.items())
            console.print(Padding(Text(f"hidden by no kernel, {whose}: {each or 'none'}"), (0, 0, 0, 2)))
    console.print()
    console.print(Text("XLA_FLAGS", "bold"), *(Padding(Text(flag), (0, 0, 0, 2)) for flag in compiled.flags))


def _figures(figures: Sequence[Figure]) -> RenderableType:
    ran = ["measured"] if any(one.measured is not None for one in figures) else []
    table = _table("", "predicted", "compiled", *ran, "off", "tolerance", "")
    for one in figures:
        show = human_bytes if one.unit == "bytes" else human_seconds
        told = [one.compiled, *([one.measured] if ran else [])]
        table.add_row(
            Text(one.name),
            show(one.predicted),
            *("-" if number is None else show(number) for number in told),
            _off(one),
            "-" if one.tolerance is None else f"{100 * one.tolerance:g} %",
            Text("" if one.holds else "OFF", "red"),
        )
    return Padding(table, (0, 0, 1, 2))


def _budget(told: Verification) -> RenderableType:
    kept = f"the compiled peak keeps to the memory budget of {human_bytes(told.budget_bytes)}"
    if told.fits and len(told.attempts) == 1:
        return Padding(Text(kept), (0, 0, 1, 2))
    table = _table("attempt", "planned for", "predicted", "compiled", "step time", "plan")
    for number, one in enumerate(told.attempts, 1):
        sizes = [one.planned_for_bytes, one.predicted_bytes, one.compiled_bytes]
        shown = ["-" if size is None else human_bytes(size) for size in sizes]
        step_time = "-" if one.step_time_s is None else human_seconds(one.step_time_s)
        table.add_row(str(number), *shown, step_time, Text(one.words))
    over = f"the compiled peak is over the memory budget of {human_bytes(told.budget_bytes)}"
    ways = "give a larger budget or more devices, a smaller batch or model"
    if not told.fits and len(told.attempts) == 1:  # a given plan
        ratio = told.budget_bytes / told.compiled.peak_bytes
        tighter = told.plan.prediction.peak_bytes * ratio
        ways = f"plan anew with a budget of {human_bytes(tighter)}, or verify without a given plan, which does so"
    grid = Table.grid()
    grid.add_row(Text(kept if told.fits else f"{over}: {ways}", "" if told.fits else "red"))
    grid.add_row(table)
    return Padding(grid, (0, 0, 1, 2))


def _collectives(matches: Sequence[CollectiveMatch]) -> RenderableType:
    table = _table("collective", "predicted", "compiled", "off", "", "what for")
    for one in matches:
        table.add_row(
            Text(f"{one.name}, between hosts" if one.crosses_hosts else one.name),
            f"{one.predicted_count}{'*' if one.combinable else ''}: {human_bytes(one.predicted_bytes)}",
            f"{one.compiled_count}: {human_bytes(one.compiled_bytes)}",
            _off(one.figure),
            Text("" if one.figure.holds else "OFF", "red"),
            Text("\n".join(one.causes)),
        )
    starred = (
        Text("* XLA may merge these into fewer: bytes are held, counts are not")
        if any(one.combinable for one in matches)
        else Text()
    )
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(starred)
    return Padding(grid, (0, 0, 1, 2))


def _one_by_one(told: Verification) -> RenderableType:
    table = _table("collective", "sends", "decisions", "what for, and where")
    for one in told.matched.compiled[:FEW_ROWS]:
        uses = [told.plan.collectives[position] for position in one.predicted]
        causes = list(dict.fromkeys(use.cause for use in sorted(uses, key=lambda use: -use.num_bytes)))
        cause = f"{causes[0]}{', …' if len(causes) > 1 else ''}" if causes else "predicted by no decision"
        times = f" x{one.num_times}" if one.num_times > 1 else ""
        table.add_row(
            Text(f"{_name_of(one)}{times}"),
            human_bytes(one.num_bytes),
            str(len(uses)),
            Text(f"{cause}\n{one.path}"),
        )
    _add_rest(table, len(told.matched.compiled) - FEW_ROWS)
    return Padding(table, (0, 0, 1, 2))


def _strangers(rows: Sequence[CompiledCollective]) -> RenderableType:
    table = _table("collective", "sends", "where")
    for one in rows[:MAX_ROWS]:
        where = [one.path, short_source(one.source)]
        table.add_row(Text(_name_of(one)), human_bytes(one.unpredicted_bytes), Text("\n".join(filter(None, where))))
    _add_rest(table, len(rows) - MAX_ROWS)
    return Padding(table, (0, 0, 1, 2))


def _missing(told: Verification) -> RenderableType:
    table = _table("collective", "sends", "what for, and where")
    for position, rest in told.matched.missing[:MAX_ROWS]:
        use = told.plan.collectives[position]
        where = [use.cause, use.path, short_source(use.source)]
        name = f"{use.kind} over {', '.join(use.axes)}"
        table.add_row(Text(name), human_bytes(rest), Text("\n".join(filter(None, where))))
    _add_rest(table, len(told.matched.missing) - MAX_ROWS)
    return Padding(table, (0, 0, 1, 2))


def _name_of(one: CompiledCollective) -> str:
    return f"{one.kind} over {'no mesh axes' if one.axes is None else ', '.join(one.axes)}"


def _add_rest(table: Table, rest: int) -> None:
    if rest > 0:
        table.add_row(Text(f"and {rest} more; --json has all"))


def _off(figure: Figure) -> str:
    return "-" if figure.off is None else f"{100 * figure.off:+.1f} %"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in columns:
        right = name in (
            "planned for",
            "predicted",
            "compiled",
            "measured",
            "off",
            "tolerance",
            "step time",
            "sends",
            "decisions",
        )
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
