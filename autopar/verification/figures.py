"""Compare predicted with compiled memory, collectives and step time.

In: a plan, its compiled step. Out: figures with tolerances. The predictions come from the plan alone and never from the
compiled program.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import UNKNOWN_TRIP_COUNT
from autopar.ir.mesh import MeshShape
from autopar.plans.plan import Plan
from autopar.plans.records import CollectiveUse
from autopar.report.breakdown import PREDICTED, SIMULATED
from autopar.verification.attribution import describe_origin, pair
from autopar.verification.step_times import StepTimes
from autopar.xla_compiler.compiler import CompiledStep
from autopar.xla_compiler.estimate_errors import LOOP
from autopar.xla_compiler.hlo_collectives import Collective, collectives, sent_bytes
from autopar.xla_compiler.hlo_metadata import mesh_axes
from autopar.xla_compiler.hlo_text import Module

#: Shapes and shardings alone determine arguments, outputs and donated outputs.
EXACT_TOLERANCE = 0.005
#: The peak depends on XLA's fusion, buffer reuse and scratch memory, which a plan only estimates; a memory budget keeps
#: a larger margin. Temporaries have no tolerance of their own: the peak contains them.
PEAK_TOLERANCE = 0.12
#: Shapes determine the bytes sent; XLA adds padding when it combines.
WIRE_TOLERANCE = 0.02
#: Two cost models of one machine that agree to this degree rank plans in the same order.
STEP_TIME_TOLERANCE = 0.20
#: Smaller differences of memory do not count: XLA aligns each buffer and keeps small constants.
MEMORY_SLACK_BYTES = 64 * 1024
#: Collectives that send fewer bytes do not count: losses, norms, counters.
WIRE_SLACK_BYTES = 1024
#: The layer number in a path; causes that differ only in it are merged.
_LAYER = re.compile(r"_\d+(?=/)")
#: XLA returns several outputs as a tuple, with a pointer to each.
_POINTER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, predicted and compiled.

    Args:
        name: e.g. `peak`.
        unit: `bytes` (on one device) or `s`.
        compiled: None where XLA reports none.
        tolerance: relative to the compiled number; None for a figure that is reported but not checked.
        slack: absolute difference, in the unit, up to which the figure holds.
        measured: the measured number where the step was run; reported but not checked.
    """

    name: str
    unit: str
    predicted: float
    compiled: float | None
    tolerance: float | None
    slack: float = 0.0
    measured: float | None = None

    @property
    def off(self) -> float | None:
        """(predicted - compiled) / compiled; None where the compiled number is missing or zero."""
        return (self.predicted - self.compiled) / self.compiled if self.compiled else None

    @property
    def holds(self) -> bool:
        if self.compiled is None or self.tolerance is None:
            return True
        return abs(self.predicted - self.compiled) <= max(self.slack, self.tolerance * self.compiled)


@dataclass(frozen=True, slots=True)
class CollectiveMatch:
    """All collectives of one kind over the same mesh axes. Bytes are those that one device sends per step.

    Args:
        axes: mesh axes; None for compiled groups that span no set of mesh axes.
        combinable: number of predicted collectives that XLA may combine, for which only bytes are checked, not counts.
        causes: causes of the largest predicted collectives, with layers merged.
        crosses_hosts: whether a compiled collective has devices of several hosts in one group.
    """

    kind: str
    axes: tuple[str, ...] | None
    predicted_count: int
    compiled_count: int
    predicted_bytes: float
    compiled_bytes: float
    combinable: int
    causes: tuple[str, ...]
    crosses_hosts: bool = False

    @property
    def name(self) -> str:
        return collective_name(self.kind, self.axes)

    @property
    def figure(self) -> Figure:
        return Figure(self.name, "bytes", self.predicted_bytes, self.compiled_bytes, WIRE_TOLERANCE, WIRE_SLACK_BYTES)


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective of XLA's program, with the decisions that predicted it.

    Args:
        axes: mesh axes; None for groups that span no set of mesh axes.
        instruction: name in the HLO.
        num_times: executions per step.
        num_bytes: bytes that one device sends per step.
        unpredicted_bytes: the part of `num_bytes` that no decision predicted.
        path, source: module path and source line in XLA's metadata.
        library_source: innermost source line outside JAX, Flax and Optax.
        predicted: positions in `Plan.collectives`.
    """

    kind: str
    axes: tuple[str, ...] | None
    instruction: str
    num_times: int
    num_bytes: float
    unpredicted_bytes: float
    path: str
    source: str
    predicted: tuple[int, ...]
    library_source: str = ""


@dataclass(frozen=True, slots=True)
class Collectives:
    """All collectives, predicted and compiled, the largest first.

    Args:
        matches: collectives by kind and mesh axes.
        compiled: compiled collectives one by one.
        missing: position in `Plan.collectives` of each predicted collective without a compiled one, and its bytes.
    """

    matches: tuple[CollectiveMatch, ...]
    compiled: tuple[CompiledCollective, ...]
    missing: tuple[tuple[int, float], ...]

    @property
    def unpredicted(self) -> tuple[CompiledCollective, ...]:
        """Compiled collectives with bytes that no decision predicted, the largest first."""
        found = (one for one in self.compiled if one.unpredicted_bytes > WIRE_SLACK_BYTES)
        return tuple(sorted(found, key=lambda one: -one.unpredicted_bytes))


def memory_figures(plan: Plan, argument_bytes: float, compiled: CompiledStep) -> tuple[Figure, ...]:
    """Compare memory, in bytes per device.

    Args:
        argument_bytes: predicted bytes of the inputs that the step reads; `jit` drops the others.
    """
    donated = set(plan.donated)
    pointers = _POINTER_BYTES * len(plan.outputs) if len(plan.outputs) > 1 else 0
    output = sum(tensor.num_bytes for tensor in plan.outputs) + pointers
    alias = sum(plan.outputs[after].num_bytes for before, after in plan.carried if before in donated)
    ran = compiled.measured.peak_bytes if compiled.measured else None
    rows = (
        ("arguments", argument_bytes, compiled.argument_bytes, EXACT_TOLERANCE),
        ("temporaries", plan.prediction.temporary_bytes, compiled.temp_bytes, None),
        ("outputs", output, compiled.output_bytes, EXACT_TOLERANCE),
        ("shared by both", alias, compiled.alias_bytes, EXACT_TOLERANCE),
        ("peak", plan.prediction.peak_bytes, compiled.peak_bytes, PEAK_TOLERANCE),
    )
    return tuple(
        Figure(name, "bytes", predicted, actual, tolerance, MEMORY_SLACK_BYTES, ran if name == "peak" else None)
        for name, predicted, actual, tolerance in rows
    )


def step_time_figure(plan: Plan, times: StepTimes, believable: bool) -> Figure:
    """Compare the plan's simulation of XLA's estimate with that estimate, or without one, its own step time.

    The simulation has the estimate's errors but for loops, so it is compared where the estimate is wrong about the device,
    too. It is checked only where XLA has measured tables of the device (`believable`).
    """
    tolerance = STEP_TIME_TOLERANCE if believable else None
    prediction, ran = plan.prediction, times.measured_s
    if prediction.xla_step_time_s is None:
        return Figure(PREDICTED, "s", prediction.step_time_s, times.sound_xla_s, tolerance, measured=ran)
    estimate = None if LOOP in times.estimate_errors else times.xla_s
    return Figure(SIMULATED, "s", prediction.xla_step_time_s, estimate, tolerance, measured=ran)


def match_collectives(plan: Plan, hlo: Module | str, hosts: Sequence[int] = ()) -> Collectives:
    """Compare a plan's collectives with those of XLA's program.

    Args:
        hosts: host of each device.
    """
    return match_compiled(plan, compiled_collectives(hlo), hosts)


def compiled_collectives(hlo: Module | str) -> list[Collective]:
    """All collectives of XLA's program."""
    return collectives(hlo, ignore_up_to=0, unknown_trip_counts=round(UNKNOWN_TRIP_COUNT))


def match_compiled(plan: Plan, found: Sequence[Collective], hosts: Sequence[int] = ()) -> Collectives:
    """Compare a plan's collectives with compiled ones; `hosts` as in `match_collectives`."""
    mesh = plan.mesh
    predicted: dict[tuple[str, tuple[str, ...] | None], list[tuple[int, CollectiveUse]]] = defaultdict(list)
    for position, use in enumerate(plan.collectives):
        axes = _real_axes(use.axes, mesh)
        if axes:
            predicted[use.kind, axes].append((position, use))
    compiled: dict[tuple[str, tuple[str, ...] | None], list[Collective]] = defaultdict(list)
    for one in found:
        axes = mesh_axes(one.groups, mesh, pairs=one.kind == "collective-permute")
        if axes != ():
            compiled[one.kind, None if axes is None else _real_axes(axes, mesh)].append(one)
    matches, rows, missing = [], [], []
    for key in sorted({*predicted, *compiled}, key=lambda key: (key[0], key[1] or ())):
        kind, axes = key
        uses, same, size = predicted.get(key, []), compiled.get(key, []), mesh.sizes(key[1] or ())
        matches.append(_match(kind, axes, [use for _, use in uses], same, mesh, hosts))
        paired = pair(same, uses, mesh.num_devices)
        for n, one in enumerate(same):
            rest = sent_bytes(kind, paired.compiled_left.get(n, 0.0), one.group_size(mesh.num_devices))
            path = describe_origin(one.op_name)
            members = paired.predicted.get(n, ())
            sent = sent_by(one, mesh)
            rows.append(
                CompiledCollective(
                    kind, axes, one.name, one.num_times, sent, rest, path, one.source, members, one.library_source
                )
            )
        left = {position: sent_bytes(kind, rest, size) for position, rest in paired.predicted_left.items()}
        missing += [(position, rest) for position, rest in left.items() if rest > WIRE_SLACK_BYTES]
    matches.sort(key=lambda match: -max(match.predicted_bytes, match.compiled_bytes))
    rows.sort(key=lambda row: -row.num_bytes)
    return Collectives(tuple(matches), tuple(rows), tuple(sorted(missing, key=lambda one: -one[1])))


def _match(
    kind: str,
    axes: tuple[str, ...] | None,
    uses: Sequence[CollectiveUse],
    found: Sequence[Collective],
    mesh: MeshShape,
    hosts: Sequence[int],
) -> CollectiveMatch:
    size = mesh.sizes(axes or ())
    by_cause: Counter[str] = Counter()
    for use in uses:
        by_cause[_LAYER.sub("_*", use.cause)] += int(use.bytes_per_step)
    return CollectiveMatch(
        kind=kind,
        axes=axes,
        predicted_count=sum(use.num_times for use in uses),
        compiled_count=sum(one.num_times for one in found),
        predicted_bytes=sum(sent_bytes(kind, use.bytes_per_step, size) for use in uses),
        compiled_bytes=sum(sent_by(one, mesh) for one in found),
        combinable=sum(use.num_times for use in uses if use.combinable),
        causes=tuple(cause for cause, _ in by_cause.most_common(2)),
        crosses_hosts=any(_crosses(one, hosts) for one in found),
    )


def _crosses(one: Collective, hosts: Sequence[int]) -> bool:
    groups = one.groups or (tuple(range(len(hosts))),)
    return bool(hosts) and any(len({hosts[device] for device in group}) > 1 for group in groups)


def sent_by(one: Collective, mesh: MeshShape) -> float:
    """Bytes that one device sends for a collective in a step."""
    size = one.group_size(mesh.num_devices)
    return one.num_times * sum(sent_bytes(one.kind, payload, size) for payload in one.payloads(mesh.num_devices))


def _real_axes(axes: Sequence[str], mesh: MeshShape) -> tuple[str, ...]:
    """The axes in the mesh's order, without those of size one."""
    return tuple(axis for axis in mesh.axis_names if axis in axes and mesh.size(axis) > 1)


def collective_name(kind: str, axes: tuple[str, ...] | None) -> str:
    """The name of a kind of collective with its mesh axes."""
    return f"{kind} over {'no mesh axes' if axes is None else ', '.join(axes)}"


def names_off(figures: Sequence[Figure]) -> tuple[str, ...]:
    """Names of the figures out of tolerance."""
    return tuple(figure.name for figure in figures if not figure.holds)


def as_json(figure: Figure) -> Mapping[str, object]:
    """A figure as JSON types."""
    return {
        "name": figure.name,
        "unit": figure.unit,
        "predicted": figure.predicted,
        "compiled": figure.compiled,
        "measured": figure.measured,
        "tolerance": figure.tolerance,
        "holds": figure.holds,
    }
