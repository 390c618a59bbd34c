"""Hold a plan against the program that XLA compiles from it, on a machine without a GPU.

In: a step, its arguments and a plan (or what to plan for). Out: `Verification`: predicted beside
compiled, which prints as text. The step is traced, planned and lowered here, and compiled in
another process (`absent`); nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar import execute
from autopar.absent import CompiledStep, compile_absent, require_wheels, target_text, topology_text
from autopar.api import ParallelStep, parallelize
from autopar.compare import (
    CollectiveMatch,
    Figure,
    Unpredicted,
    as_json,
    match_collectives,
    memory_figures,
    names_off,
    step_time_figure,
)
from autopar.cost.hardware import HardwareProfile, load
from autopar.explain import plain_text, short_source
from autopar.jax_compat import module_bytes
from autopar.plan import Plan
from autopar.planner import Program
from autopar.units import human_bytes, human_seconds

#: Rows shown of collectives that nobody predicted; the JSON has all.
MAX_ROWS = 16


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """Predicted beside compiled. Printed, it is plain text.

    Args:
        plan: what was held against XLA's program.
        topology: `slices x hosts x GPUs` that it was compiled for.
        memory: arguments, temporaries, outputs, what these share, and the peak; bytes per device.
        collectives: by kind and mesh axes, the largest first.
        unpredicted: compiled collectives that no decision accounts for, the largest first.
        step_time: the plan's beside the estimate of XLA's scheduler.
        compiled: what XLA made, its text included.
    """

    plan: Plan
    topology: str
    memory: tuple[Figure, ...]
    collectives: tuple[CollectiveMatch, ...]
    unpredicted: tuple[Unpredicted, ...]
    step_time: Figure
    compiled: CompiledStep

    @property
    def off(self) -> tuple[str, ...]:
        """The names of the figures that are off by more than their tolerance; empty where all hold."""
        return names_off([*self.memory, *(match.figure for match in self.collectives), self.step_time])

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
            "holds": self.holds,
            "off": list(self.off),
            "memory": [as_json(figure) for figure in self.memory],
            "step_time": as_json(self.step_time),
            "predicted_collective_s": self.plan.prediction.collective_s,
            "exposed_s": compiled.exposed_s,
            "collectives": [{**asdict(match), "holds": match.figure.holds} for match in self.collectives],
            "unpredicted": [asdict(one) for one in self.unpredicted],
        }


def verify(
    step: Callable[..., Any],
    *args: Any,
    plan: Plan | str | Path | None = None,
    hosts: int | None = None,
    **options: Any,
) -> Verification:
    """Compile the planned step for its GPUs, none of which need exist, and compare.

    Args:
        step: a function as for `autopar.plan`, or a step made by `autopar.parallelize`, whose plan and
            options hold unless others are given.
        args: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
        plan: the plan to hold against XLA's program; by default one is made.
        hosts: over how many hosts the devices are spread; by default as few as the profile needs.
        options: those of `autopar.plan`. With `plan`, `hardware` says what to compile for.

    Raises:
        VerifyError: the CUDA wheels are missing, or XLA refuses the program.
        AutoparError: as `autopar.plan` raises.
    """
    require_wheels()  # before planning, which may take long
    if isinstance(step, ParallelStep) and plan is None and not options:
        parallel = step
    else:
        function = step.__wrapped__ if isinstance(step, ParallelStep) else step  # type: ignore[attr-defined]
        parallel = parallelize(function, plan=plan, **options)
    report: Callable[[str, float], None] = options.get("progress") or (lambda stage, fraction: None)
    made, program = parallel.planned(*args)
    profile = _profile(options.get("hardware"), made)
    num_hosts = -(-made.mesh.num_devices // profile.devices_per_host) if hosts is None else hosts
    topology = topology_text(made.mesh.num_devices, num_hosts)
    target_text(profile)  # a profile without a GPU is refused before lowering
    report("lower", 1.0)
    jitted = execute.jit_plan(made, program.trace, execute.abstract_mesh(made.mesh))
    module = module_bytes(execute.lower_for("cuda", jitted, args))
    report("XLA compiles", 1.0)
    compiled = compile_absent(module, profile, made.mesh.num_devices, num_hosts)
    matches, unpredicted = match_collectives(made, compiled.hlo_text)
    # V100 and A100 have no such figures, and XLA's estimate is not to be believed there.
    believable = "matrix_unit_description" in (profile.xla_target or {})
    return Verification(
        plan=made,
        topology=topology,
        memory=memory_figures(made, _argument_bytes(made, program), compiled),
        collectives=matches,
        unpredicted=unpredicted,
        step_time=step_time_figure(made, compiled, believable),
        compiled=compiled,
    )


def _profile(given: Any, plan: Plan) -> HardwareProfile:
    return given if isinstance(given, HardwareProfile) else load(given or plan.hardware)


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
        Text(f"compiled for {plan.hardware}, topology {told.topology}, in {human_seconds(compiled.compile_s)}\n")
    )
    console.print(Text("Memory, per device", "bold"), _figures(told.memory))
    console.print(Text("Collectives: what one device sends in a step", "bold"))
    console.print(_collectives(told.collectives) if told.collectives else Padding(Text("none\n"), (0, 0, 0, 2)))
    if told.unpredicted:
        console.print(Text("Compiled, and predicted by no decision", "bold"), _strangers(told.unpredicted))
    console.print(Text("Step time, and XLA's estimate of it", "bold"), _figures([told.step_time]))
    exposed = [f"{kind} {human_seconds(seconds)}" for kind, seconds in compiled.exposed_s.items()]
    priced = [f"{kind} {human_seconds(seconds)}" for kind, seconds in plan.prediction.collective_s.items()]
    console.print(Padding(Text(f"exposed, says XLA: {', '.join(exposed) or 'none'}"), (0, 0, 0, 2)))
    console.print(Padding(Text(f"priced by the plan: {', '.join(priced) or 'none'}\n"), (0, 0, 0, 2)))
    console.print(Text("XLA_FLAGS", "bold"), *(Padding(Text(flag), (0, 0, 0, 2)) for flag in compiled.flags))


def _figures(figures: Sequence[Figure]) -> RenderableType:
    table = _table("", "predicted", "compiled", "off", "tolerance", "")
    for one in figures:
        show = human_bytes if one.unit == "bytes" else human_seconds
        table.add_row(
            Text(one.name),
            show(one.predicted),
            "-" if one.compiled is None else show(one.compiled),
            _off(one),
            "-" if one.tolerance is None else f"{100 * one.tolerance:g} %",
            Text("" if one.holds else "OFF", "red"),
        )
    return Padding(table, (0, 0, 1, 2))


def _collectives(matches: Sequence[CollectiveMatch]) -> RenderableType:
    table = _table("collective", "predicted", "compiled", "off", "", "what for")
    for one in matches:
        table.add_row(
            Text(one.name),
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


def _strangers(rows: Sequence[Unpredicted]) -> RenderableType:
    table = _table("collective", "sends", "where")
    for one in rows[:MAX_ROWS]:
        axes = "no mesh axes" if one.axes is None else ", ".join(one.axes)
        where = [one.path, short_source(one.source)]
        table.add_row(Text(f"{one.kind} over {axes}"), human_bytes(one.num_bytes), Text("\n".join(filter(None, where))))
    if len(rows) > MAX_ROWS:
        table.add_row(Text(f"and {len(rows) - MAX_ROWS} more; --json has all"), "", "")
    return Padding(table, (0, 0, 1, 2))


def _off(figure: Figure) -> str:
    return "-" if figure.off is None else f"{100 * figure.off:+.1f} %"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in columns:
        right = name in ("predicted", "compiled", "off", "tolerance", "sends")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
