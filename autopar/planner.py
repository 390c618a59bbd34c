"""The straight line from a function to a plan.

    fn -> Trace -> Graph -> groups -> Formulation (Problem) -> Solution -> Plan

In: a step and abstract arguments, a mesh (or a device count), a hardware profile. Out: `Plan`.
Nothing is compiled and no device is touched, unless neither mesh nor device count is given.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

import jax

from autopar.assemble import Assembled, assemble
from autopar.cost import hardware as hardware_profiles
from autopar.cost.collectives import workers_of
from autopar.cost.hardware import HardwareProfile
from autopar.device_program import stored_values
from autopar.errors import BudgetError, MeshError, MicrobatchError, TimeLimitError
from autopar.factoring.whole import sees_two
from autopar.formulation import Formulation, formulate
from autopar.graph.ir import UNKNOWN_TRIPS, Graph, Node
from autopar.mesh import MeshShape, factorisations, parse_mesh
from autopar.microbatch.places import num_examples
from autopar.num_microbatches import fewest_that_fit
from autopar.pins import meshes_of_program, meshes_with_pinned_axes, resolve_pins
from autopar.plan import Constraint, Microbatches, Outcome, Plan, RejectedMesh, split_dims
from autopar.program import Program, program_of
from autopar.rules.factors import Rule
from autopar.rules.groups import Group, form_groups
from autopar.rules.registered import called, needs_local, template
from autopar.rules.registry import NodeView
from autopar.rules.table import rule_for, unknown_rule
from autopar.sharding import TensorSharding, replicated
from autopar.solve.ilp import Ilp, minimum_memory
from autopar.solve.problem import Solution, Solver, Status
from autopar.units import human_bytes
from autopar.version import __version__
from autopar.words import strategy_words

Progress = Callable[[str, float], None]

#: The part of a memory budget that a plan leaves free: for what XLA's fusion holds beyond the plan's
#: estimate, and for the allocator, whose memory is never all in one piece.
BUDGET_MARGIN = 0.05

#: How often the solver's measure of memory is set right by a whole plan's.
_MOST_TIGHTENINGS = 4


def plan(
    step: Callable[..., Any],
    *args: Any,
    mesh: str | MeshShape | jax.sharding.Mesh | None = None,
    num_devices: int | None = None,
    hardware: str | HardwareProfile | None = None,
    memory_budget_bytes: float | None = None,
    pin: Mapping[str, Any] | None = None,
    carry: Sequence[str] | None = None,
    donate: Sequence[str] | None = None,
    num_microbatches: int | Literal["auto"] = 1,
    per_microbatch_statistics: bool = False,
    solver: Solver | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Plan:
    """Choose how to split every tensor of a step.

    Args:
        step: a function of pytrees of arrays, e.g. `(state, batch) -> (state, loss)`.
        args: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
        mesh: `"2x4"`, `"data=2,model=4"`, a `MeshShape` or a `jax.sharding.Mesh`.
        num_devices: with this alone, every mesh of at most two axes is planned and the cheapest kept.
            With neither, the visible devices are counted.
        hardware: name of a profile, path of a profile file, or a profile; by default that of the
            visible devices.
        memory_budget_bytes: per device; by default what the hardware profile says is usable.
        pin: input path or glob (`"state/params/*/kernel"`) -> `PartitionSpec`.
        carry: names of arguments that come back updated; by default found by structure.
        donate: names of arguments whose buffers the step may reuse; by default the carried ones.
        num_microbatches: split the batch over time into so many parts, whose gradients are summed: the same numbers
            for less memory. `"auto"`: as few as fit the budget, or more where the step is then faster.
        per_microbatch_statistics: allow that of a step whose batch feeds back, as batch normalisation does, in which
            each microbatch then has its own statistics.
        solver: by default `Ilp(time_limit_s)`.
        time_limit_s: seconds for the solver, per mesh.
        progress: called with a stage's name and the fraction done.

    Raises:
        AutoparError: one of its subclasses, naming what to change.
    """
    if progress is not None:
        progress("trace", 0.0)
    return plan_program(
        program_of(step, args, carry=carry, donate=donate),
        mesh=mesh,
        num_devices=num_devices,
        hardware=hardware,
        memory_budget_bytes=memory_budget_bytes,
        pin=pin,
        num_microbatches=num_microbatches,
        per_microbatch_statistics=per_microbatch_statistics,
        solver=solver,
        time_limit_s=time_limit_s,
        progress=progress,
    )


def plan_program(
    program: Program,
    *,
    num_microbatches: int | Literal["auto"] = 1,
    per_microbatch_statistics: bool = False,
    **options: Any,
) -> Plan:
    """`plan`, for a program already traced."""
    program = program.unsplit or program

    def planned(count: int) -> Plan:
        split = program.in_microbatches(count, own_statistics=per_microbatch_statistics)
        return _plan_program(split, **options)

    if num_microbatches == "auto":
        return fewest_that_fit(planned, lambda: num_examples(program.graph))
    if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
        raise MicrobatchError(f'`num_microbatches` is {num_microbatches!r}: give 1 or more, or "auto"')
    try:
        return planned(num_microbatches)
    except BudgetError as error:
        if num_microbatches > 1 or not _splits(program):
            raise
        raise BudgetError(
            f'{error} Or split the batch over time: `num_microbatches="auto"` computes the same in less memory.'
        ) from None


def _splits(program: Program) -> bool:
    try:
        program.in_microbatches(2)
    except MicrobatchError:
        return False
    return True


def _plan_program(
    program: Program,
    *,
    mesh: str | MeshShape | jax.sharding.Mesh | None = None,
    num_devices: int | None = None,
    hardware: str | HardwareProfile | None = None,
    memory_budget_bytes: float | None = None,
    pin: Mapping[str, Any] | None = None,
    solver: Solver | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Plan:
    report = progress or (lambda stage, fraction: None)
    profile = _profile(hardware)
    meshes = meshes_with_pinned_axes(meshes_of_program(_meshes(mesh, num_devices), program.graph), pin or {})
    budget = profile.usable_bytes if memory_budget_bytes is None else float(memory_budget_bytes)
    solve_with = solver or Ilp(time_limit_s=time_limit_s)
    distinct, twins = _distinct(meshes, profile, symmetric=not pin and not _names_axes(program.graph))
    one = resolve_pins(pin or {}, program.graph, distinct[0])
    forms = [(form, _group(form.graph, one)) for form in program.forms]
    plans: list[Plan] = []
    failures: list[tuple[MeshShape, BudgetError]] = []
    for i, shape in enumerate(distinct):
        report(f"plan {shape}", 0.1 + 0.9 * i / len(distinct))
        try:
            pins = resolve_pins(pin or {}, program.graph, shape)
            plans.append(_plan_in_a_form(shape, forms, profile, budget * (1 - BUDGET_MARGIN), pins, solve_with))
        except BudgetError as error:
            failures.append((shape, error))
    report("done", 1.0)
    if not plans:
        raise failures[0][1]
    best = min(plans, key=lambda p: p.prediction.step_time_s)
    return replace(
        best,
        memory_budget_bytes=memory_budget_bytes,
        rejected=_rejected(best, plans, failures, twins),
        pins={path: str(spec) for path, spec in (pin or {}).items()},
    )


# -- one mesh --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Grouped:
    """What no mesh changes: the groups, and how often a primitive without a rule is used."""

    groups: tuple[Group, ...]
    unknown: Counter[str]


def _group(graph: Graph, pins: Mapping[int, TensorSharding]) -> _Grouped:
    rules, unknown = rules_of(graph)
    absorbable = frozenset(range(len(graph.inputs))) - set(pins)
    return _Grouped(form_groups(graph, rules, absorbable), unknown)


def _plan_in_a_form(shape: MeshShape, forms: Sequence[tuple[Program, _Grouped]], *given: Any) -> Plan:
    """A plan of the step that sees dims as two where it splits these; else one of the step as it was written, which
    can be split in ways that the other cannot."""
    *seeing_two, (whole, grouped) = forms
    for form, groups in seeing_two:
        try:
            made = _plan_on(shape, form, groups, *given)
        except BudgetError:
            continue
        if sees_two(form.trace, split_dims(made)):
            return made
    return _plan_on(shape, whole, grouped, *given)


def _plan_on(
    mesh: MeshShape,
    program: Program,
    grouped: _Grouped,
    profile: HardwareProfile,
    budget: float,
    pins: dict[int, TensorSharding],
    solver: Solver,
) -> Plan:
    graph, groups = program.graph, grouped.groups
    started = time.perf_counter()
    formulation = formulate(graph, groups, mesh, profile, pins=pins, memory_budget_bytes=None)
    solution = solver.solve(formulation.problem)
    if len(solution.choices) != len(formulation.decisions):
        raise TimeLimitError(f"planning for mesh {mesh} ended with: {solution.status.value}")
    parts = assemble(formulation, solution.choices, pins)
    memory_bound = parts.prediction.peak_bytes > budget
    if memory_bound:  # only now is memory worth its constraints
        formulation, solution, parts = _within(budget, formulation, solution.choices, parts, pins, solver)
    return Plan(
        program=program.signature,
        mesh=mesh,
        hardware=profile.name,
        memory_budget_bytes=budget,
        words=strategy_words(formulation, solution.choices, parts.inputs),
        inputs=parts.inputs,
        outputs=parts.outputs,
        carried=graph.carried,
        donated=program.donated,
        constraints=parts.constraints,
        decisions=parts.decisions,
        collectives=parts.collectives,
        regions=parts.regions,
        microbatches=_microbatches(program, mesh, parts.constraints),
        prediction=parts.prediction,
        outcome=_outcome(solution, formulation, time.perf_counter() - started, memory_bound),
        notes=(*_notes(graph, mesh, grouped.unknown, parts.inputs), *_microbatch_notes(program, mesh)),
        versions={"autopar": __version__, "jax": version("jax"), "ortools": version("ortools")},
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )


def _microbatches(program: Program, mesh: MeshShape, constraints: Sequence[Constraint]) -> Microbatches | None:
    """What the loop over microbatches sums from trip to trip."""
    source, graph = program.trace.microbatches, program.graph
    if source is None:
        return None
    loops = [region for region in program.trace.regions if region.kind in ("scan", "while")]
    loop = next(loop for loop, region in zip(graph.loops, loops, strict=True) if region.source is source)
    split = {one.value: one.shardings[-1] for one in constraints if one.node is None}
    carried = [graph.nodes[leave].results[0] for _, leave in loop.carries]
    infos = [(graph.values[value], split.get(value, replicated(len(graph.values[value].shape)))) for value in carried]
    return Microbatches(
        count=program.num_microbatches,
        num_examples=num_examples(graph),
        accumulated_bytes=sum(info.itemsize * sharding.local_size(info.shape, mesh) for info, sharding in infos),
        num_accumulated=len(carried),
        own_statistics=program.own_statistics,
    )


def rules_of(graph: Graph) -> tuple[tuple[Rule, ...], Counter[str]]:
    """A rule per node, and the primitives that have none, or none that can be used."""
    unknown: Counter[str] = Counter()
    rules: list[Rule] = []
    for node in graph.nodes:
        view = NodeView.of(node, graph)
        rule = rule_for(view)
        if rule is None or needs_local(view):
            unknown[called(view)] += not node.effect
        rule = rule or unknown_rule(view)
        rules.append(rule)
    return tuple(rules), unknown


def _outcome(solution: Solution, formulation: Formulation, seconds: float, memory_bound: bool) -> Outcome:
    return Outcome(
        cost_s=solution.cost,
        lower_bound_s=solution.lower_bound,
        gap=solution.gap if formulation.decisions else 0.0,  # a program of small values leaves no choice
        status=solution.status.value,
        num_nodes=len(formulation.decisions),
        num_strategies=sum(d.num_strategies for d in formulation.decisions),
        solve_time_s=seconds,
        memory_bound=memory_bound,
    )


def _within(
    budget: float,
    free: Formulation,
    choices: Sequence[int],
    parts: Assembled,
    pins: dict[int, TensorSharding],
    solver: Solver,
) -> tuple[Formulation, Solution, Assembled]:
    """A plan whose predicted peak keeps to a budget.

    The problem counts the values that the free plan has in memory; what XLA would really keep is known only of a
    whole plan. So the problem's limit is the budget by the ratio of the two, set again where a plan is still over.

    Args:
        choices, parts: of the plan without a budget.
    """
    stored = stored_values(parts.device)

    def formulation(mesh: MeshShape) -> Formulation:
        return formulate(
            free.graph, free.groups, mesh, free.profile, pins=pins, memory_budget_bytes=budget, stored=stored
        )

    f = formulation(free.mesh)
    ratio = f.problem.peak_memory(_with_shared_copies(free, f, choices)) / parts.prediction.peak_bytes
    limit = budget * ratio
    least_met, status = parts.prediction.peak_bytes, Status.NOT_FOUND
    for _ in range(_MOST_TIGHTENINGS):
        limited = replace(f, problem=replace(f.problem, memory_limit=limit))
        solution = solver.solve(limited.problem)
        status = solution.status
        if len(solution.choices) != len(f.decisions):
            break
        parts = assemble(limited, solution.choices, pins)
        if parts.prediction.peak_bytes <= budget:
            return limited, solution, parts
        least_met = min(least_met, parts.prediction.peak_bytes)
        limit *= 0.995 * budget / parts.prediction.peak_bytes
    if status is Status.NOT_FOUND:
        raise TimeLimitError(f"planning for mesh {free.mesh} within its memory budget ended without a plan")

    least = minimum_memory(f.problem)
    if least.choices:  # XLA may store more of that plan than the problem counts
        least_met = min(least_met, assemble(f, least.choices, pins).prediction.peak_bytes)

    def estimate(mesh: MeshShape) -> float:
        return minimum_memory(formulation(mesh).problem).peak_bytes / ratio

    raise _over_budget(free.mesh, budget, least_met, estimate)


def _with_shared_copies(free: Formulation, limited: Formulation, choices: Sequence[int]) -> tuple[int, ...]:
    """Choices of the problem without a budget as those of the one with: its copies say too whether they are their
    maker's own buffer, and those come first."""
    made = {flow.target: flow.made[choices[flow.source]] for flow in free.flows if not flow.uses}
    mapped = list(choices)
    for node, decision in enumerate(free.decisions):
        if decision.kind == "copy" and decision.shardings[choices[node]] != made.get(node):
            mapped[node] += decision.num_strategies
    assert all(c < d.num_strategies for c, d in zip(mapped, limited.decisions, strict=True))
    return tuple(mapped)


def _over_budget(mesh: MeshShape, budget: float, needed: float, least: Callable[[MeshShape], float]) -> BudgetError:
    """How short it is, and what would fit.

    Args:
        needed: the least of the plans made for this mesh. least: about what a mesh needs at the least.
    """
    ways = [f"give `memory_budget_bytes={1.001 * needed / (1 - BUDGET_MARGIN):.4g}` or more"]
    for times in (2, 4, 8):
        larger = MeshShape(mesh.axis_names, (mesh.axis_sizes[0] * times, *mesh.axis_sizes[1:]))
        if least(larger) <= budget:
            ways.append(f"use {larger.num_devices} devices (mesh {larger})")
            break
    short = f"{human_bytes(needed - budget)} short" if needed > 1.001 * budget else "just short"
    return BudgetError(
        f"no plan on mesh {mesh} fits the memory budget of {human_bytes(budget / (1 - BUDGET_MARGIN))} per device, of"
        f" which {100 * BUDGET_MARGIN:g} % stay free: the least that any"
        f" sharding tried reaches is {human_bytes(needed)}, {short}. Ways out: {'; '.join(ways)};"
        f" a smaller batch or model."
    )


def _notes(graph: Graph, mesh: MeshShape, unknown: Counter[str], inputs: Sequence[Any]) -> tuple[str, ...]:
    notes = [
        f"`{name}` has {_lack(graph, name)}: its {count} uses run replicated, and are priced so{_way_out(graph, name)}"
        for name, count in sorted(unknown.items())
        if count
    ]
    effects = Counter(node.primitive for node in graph.nodes if node.effect)
    notes += [
        f"`{name}` has a side effect: each of its {count} uses runs once per step, on whole values"
        for name, count in sorted(effects.items())
    ]
    endless = [node for node in graph.nodes if node.primitive == "predicate"]
    if endless:
        notes.append(
            f"how often a `while` loop runs is known only as it does: each of {len(endless)} is priced for"
            f" {UNKNOWN_TRIPS:g} trips. The first is at {endless[0].source or 'an unknown line'}"
        )
    axes = [(a, s) for a, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if s > 1]
    undivided: dict[int, list[str]] = {}
    for tensor in inputs:
        whole = tensor.role == "data" and tensor.shape and tensor.shape[0] > 1 and not any(tensor.sharding.dims)
        if whole and axes and all(tensor.shape[0] % size for _, size in axes):
            undivided.setdefault(tensor.shape[0], []).append(tensor.path)
    for size, paths in undivided.items():
        named = ", ".join(f"{a}={s}" for a, s in axes)
        notes.append(
            f"the leading dim of {', '.join(f'`{p}`' for p in paths[:3])} is {size}, which no mesh axis ({named})"
            f" divides: it is not split. A multiple of {axes[-1][1]} would be."
        )
    return tuple(notes)


def _microbatch_notes(program: Program, mesh: MeshShape) -> tuple[str, ...]:
    """A microbatch has fewer examples than the batch: perhaps too few to split over devices."""
    axes = [size for size in mesh.axis_sizes if size > 1]
    whole = num_examples(program.graph) if program.num_microbatches > 1 else 1
    each = whole // program.num_microbatches
    if not any(whole % size == 0 and each % size for size in axes):
        return ()
    return (
        f"a microbatch has {each} of {whole} examples, which not every axis of the mesh divides that divides the batch:"
        " fewer microbatches can be split better over devices",
    )


#: Primitives that hold a whole program, which no rule describes.
_PROGRAMS = frozenset(["call_hi_primitive"])


def _names_axes(graph: Graph) -> bool:
    """Whether the program itself splits anything: then axes of one size are not alike."""
    return any(node.params.get("axis_sizes") for node in graph.nodes)


def _first_use(graph: Graph, name: str) -> tuple[Node, NodeView]:
    views = ((node, NodeView.of(node, graph)) for node in graph.nodes if not node.effect)
    return next((node, view) for node, view in views if called(view) == name)


def _lack(graph: Graph, name: str) -> str:
    _, view = _first_use(graph, name)
    return "a sharding rule without `local`, which runs a part of it" if needs_local(view) else "no sharding rule"


def _way_out(graph: Graph, name: str) -> str:
    """Where a primitive without a rule is first used, and the line that would give it one."""
    node, view = _first_use(graph, name)
    what = f", a `{node.primitive}`," if name != node.primitive else ""
    where = f". The first{what} is at {node.source or 'an unknown line'}"
    if node.primitive in _PROGRAMS:
        return where
    if needs_local(view):
        return f"{where}. To split it, give `register_rule` a function of one device's operands as `local`"
    return f"{where}. To split it, name the loops instead of the dots: `{template(view)}`"


# -- meshes ----------------------------------------------------------------------------------


def _meshes(mesh: str | MeshShape | jax.sharding.Mesh | None, num_devices: int | None) -> tuple[MeshShape, ...]:
    if mesh is None:
        return factorisations(jax.device_count() if num_devices is None else num_devices)
    if isinstance(mesh, str):
        shape = parse_mesh(mesh)
    elif isinstance(mesh, MeshShape):
        shape = mesh
    else:
        shape = MeshShape(tuple(mesh.axis_names), tuple(mesh.axis_sizes))
    if num_devices is not None and shape.num_devices != num_devices:
        raise MeshError(
            f"mesh {shape.describe()} has {shape.num_devices} devices, but {num_devices} were asked for:"
            " give one of the two, or make them agree"
        )
    return (shape,)


def _distinct(
    meshes: Sequence[MeshShape], profile: HardwareProfile, *, symmetric: bool
) -> tuple[list[MeshShape], dict[MeshShape, MeshShape]]:
    """Meshes that differ in more than the names of their axes, and the others with their twin."""
    seen: dict[Any, MeshShape] = {}
    distinct, twins = [], {}
    for mesh in meshes:
        sizes = [workers_of((a,), mesh, profile) for a in mesh.axis_names]
        key = tuple(sorted(sizes, key=repr)) if symmetric else mesh
        if key in seen:
            twins[mesh] = seen[key]
        else:
            seen[key] = mesh
            distinct.append(mesh)
    return distinct, twins


def _rejected(
    best: Plan,
    plans: Sequence[Plan],
    failures: Sequence[tuple[MeshShape, BudgetError]],
    twins: Mapping[MeshShape, MeshShape],
) -> tuple[RejectedMesh, ...]:
    out = [
        RejectedMesh(
            mesh=p.mesh, step_time_s=p.prediction.step_time_s, peak_bytes=p.prediction.peak_bytes, words=p.words
        )
        for p in plans
        if p is not best
    ]
    by_mesh = {p.mesh: p for p in plans}
    for mesh, twin in twins.items():
        if twin in by_mesh:
            p = by_mesh[twin].prediction
            words = f"the same as {twin} with the axes' names exchanged"
            out.append(RejectedMesh(mesh=mesh, step_time_s=p.step_time_s, peak_bytes=p.peak_bytes, words=words))
    out += [
        RejectedMesh(
            mesh=mesh, step_time_s=float("inf"), peak_bytes=float("inf"), words=str(error).split(". Ways out")[0]
        )
        for mesh, error in failures
    ]
    return tuple(out)


def _profile(hardware: str | HardwareProfile | None) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is None:
        device = jax.devices()[0]
        hardware = hardware_profiles.detect(device.device_kind, device.platform)
    return hardware_profiles.load(hardware)
