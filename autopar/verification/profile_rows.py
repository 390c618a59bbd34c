"""Assign predicted, replayed and measured time to modules, phases and kinds of collectives.

In: a plan's timeline, a replay of the HLO, the measured operations of a profile. Out: seconds by `Place`. HLO
instructions find their module by the name stack in their metadata, in the form of a plan.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from autopar.frontend.flat_jaxpr import phase_of
from autopar.ir.mesh import MeshShape
from autopar.plans.plan import Plan
from autopar.plans.step_trace import StepTrace
from autopar.verification.attribution import REPLAYED, module_paths
from autopar.xla_compiler.hlo_collectives import groups_of, source_of
from autopar.xla_compiler.hlo_metadata import mesh_axes
from autopar.xla_compiler.hlo_text import Instruction, Module, parse_module
from autopar.xla_profile.profile import by_instruction, issued_kind

#: Phase, module path and kind: `kernels`, or a collective with its mesh axes, which has no path.
Place: TypeAlias = tuple[str, str, str]

KERNELS = "kernels"
IDLE: Place = ("", "", "idle")
#: A timeline is in whole nanoseconds: a smaller rest of the step time is no idle time.
_ROUNDING = 1e-3


@dataclass(slots=True)
class Spent:
    """Seconds of one step: exposed ones count towards the step time, `seconds` include hidden ones."""

    exposed_s: float = 0.0
    seconds: float = 0.0

    def add(self, exposed_s: float, seconds: float) -> None:
        self.exposed_s += exposed_s
        self.seconds += seconds


def predicted(plan: Plan, trace: StepTrace, *, with_axes: bool) -> dict[Place, Spent]:
    """The seconds of a plan's timeline.

    Args:
        with_axes: whether to divide collectives by mesh axes.
    """
    found: dict[Place, Spent] = defaultdict(Spent)
    for place, ns in zip(trace.kernels.place, trace.kernels.ns, strict=True):
        found[*trace.places[place], KERNELS].add(1e-9 * ns, 1e-9 * ns)
    sent = trace.collectives
    for kind, place, ns, exposed in zip(sent.kind, sent.place, sent.ns, sent.exposed_ns, strict=True):
        name, axes = trace.kinds[kind]
        found[trace.places[place][0], "", collective(name, axes if with_axes else None)].add(1e-9 * exposed, 1e-9 * ns)
    idle = plan.prediction.step_time_s - sum(spent.exposed_s for spent in found.values())
    if idle > _ROUNDING * plan.prediction.step_time_s:
        found[IDLE].add(idle, idle)
    return found


def collective(kind: str, axes: Iterable[str] | None) -> str:
    """The name of a kind of collective, with its mesh axes where they are known."""
    return f"{kind} over {', '.join(axes)}" if axes else kind


class Places:
    """The place of each HLO instruction in a plan.

    Args:
        hlo_text: optimized HLO; empty where it is not known.
    """

    def __init__(self, plan: Plan, trace: StepTrace, hlo_text: str) -> None:
        self.mesh: MeshShape = plan.mesh
        self.module: Module | None = parse_module(hlo_text) if hlo_text else None
        self.known = by_instruction(self.module) if self.module else {}
        self.sources = self.module.sources if self.module else {}
        self.planned: Mapping[str, set[str]] = _paths_by_phase(trace)
        #: Module paths in the HLO's metadata that the plan has too, and those that it has not.
        self.found: set[str] = set()
        self.missing: set[str] = set()
        self._of: dict[tuple[str, str], Place] = {}

    def of(self, operation: str, kind: str) -> Place:
        """The place of an instruction; `kind` is its collective, empty for kernels."""
        if (operation, kind) not in self._of:
            self._of[operation, kind] = self._find(operation, kind)
        return self._of[operation, kind]

    def _find(self, operation: str, kind: str) -> Place:
        one = self.known.get(operation)
        if one is None:
            return ("", "", kind) if kind else ("", "(no HLO instruction)", KERNELS)
        name = self._op_name(one)
        phase = self._phase(name)
        if kind:
            return phase, "", collective(kind, self._axes(one, kind))
        return phase, self._path(phase, name), KERNELS

    def path(self, operation: str) -> str:
        """The module path of an instruction, as deep as its metadata has it."""
        one = self.known.get(operation)
        return _common_path(self._op_name(one)) if one else ""

    def source(self, operation: str) -> str:
        """The line of the user's code that an instruction comes from: `file.py:12`."""
        one = self.known.get(operation)
        line = source_of(one, self.sources)[0] if one else ""
        if one and not line:
            line = next((found for inner in self._inner(one) if (found := source_of(inner, self.sources)[0])), "")
        return line.removeprefix(f"{Path.cwd()}{os.sep}")

    def _phase(self, name: str) -> str:
        phase = phase_of(name.rsplit(f"/{REPLAYED}/", 1)[-1])
        # The only phase of a program without gradients is the forward pass.
        return "forward" if phase == "update" and set(self.planned) <= {"forward"} else phase

    def _path(self, phase: str, name: str) -> str:
        """The longest prefix of the module path that the plan has: a plan may group modules."""
        path = _common_path(name)
        planned = self.planned.get(phase, set())
        for prefix in _prefixes(path):
            if prefix in planned or any(prefix in others for others in self.planned.values()):
                self.found.add(prefix)
                return prefix
        if path:
            self.missing.add(path)
        return path

    def _axes(self, one: Instruction, kind: str) -> tuple[str, ...] | None:
        for issued in (one, *self._inner(one)):
            text, groups = groups_of(issued)
            if text or (self.module and issued_kind(self.module, issued) == kind and not issued.callees):
                return mesh_axes(groups, self.mesh, pairs=kind == "collective-permute")
        return None

    def _op_name(self, one: Instruction) -> str:
        return one.op_name or next((inner.op_name for inner in self._inner(one) if inner.op_name), "")

    def _inner(self, one: Instruction) -> Iterator[Instruction]:
        """The instructions that it calls, the root first."""
        for called in self.module.called(one) if self.module else ():
            yield called.root
            yield from called.instructions


def _paths_by_phase(trace: StepTrace) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for phase, path in trace.places:
        found[phase].add(path)
    return dict(found)


def _common_path(op_name: str) -> str:
    """The module path of a name stack; of several, what they begin with."""
    names = op_name.split(";") if op_name else []  # XLA joins the names of merged instructions by semicolons
    paths = [path for name in names for path in module_paths(name)]
    levels = zip(*(path.split("/") for path in paths), strict=False)
    return "/".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split("/") if path else []
    for end in range(len(parts), 0, -1):
        yield "/".join(parts[:end])
