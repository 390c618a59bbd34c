"""The straight line from a function to a plan.

    Program (Trace, Graph) -> groups -> Formulation (Problem) -> Solution -> Plan

In: a traced program, a mesh (or a device count), a hardware profile. Out: `Plan`.
Nothing is compiled and no device is touched, unless neither mesh nor device count is given.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from autopar.cost import hardware_profile as hardware_profiles
from autopar.cost.collectives import workers_of
from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.resharding_matrix import ReshardingTimes
from autopar.errors import BudgetError, MeshError, MicrobatchError, PinError
from autopar.formulate.formulation import Formulation, formulate
from autopar.frontend.sharding_metadata import Rules
from autopar.ir.device_program import DeviceProgram
from autopar.ir.graph import UNKNOWN_TRIPS, Graph, Node
from autopar.ir.mesh import MeshShape, factorisations, mesh_of
from autopar.ir.sharding import TensorSharding
from autopar.ir.verifier import check_explicit
from autopar.planner.cache import plans as plan_cache
from autopar.planner.fork_pool import Lane, Least, each_its_own, lanes, spread
from autopar.planner.layout_hints import Metadata, Told, check_mesh_like, options_like, told_by_metadata, told_by_plan
from autopar.planner.memory_search import BUDGET_MARGIN, Made, NothingFitsError, Planning, within_budget
from autopar.planner.microbatch_count import fastest_that_fits, microbatch_notes, microbatches_of
from autopar.planner.overlap_search import Prices, best_hidden, counting_on_overlap, least_s
from autopar.planner.pins import meshes_of_program, meshes_with_pinned_axes, resolve_pins
from autopar.planner.plan_assembly import named, separate_sums
from autopar.planner.strategy_names import strategy_words
from autopar.plans.plan import Plan
from autopar.plans.records import Outcome, RejectedMesh, Replicated, Tie, num_split, split_dims
from autopar.rules.factors import Rule
from autopar.rules.grouping import Group, form_groups
from autopar.rules.node_view import NodeView, of_each_node
from autopar.rules.table import rule_for, unknown_rule
from autopar.rules.user_rules import called, needs_local, template
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Solution, Solver
from autopar.system.gc_pause import seldom_collect
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program
from autopar.transforms.split_dims.undo import sees_two
from autopar.version import versions_of
from autopar.xla_model.step_summary import memory_over_step, seconds_by_node, step_trace

Progress = Callable[[str, float], None]

#: How close to the optimum a plan under a budget is proven: of its many problems, the last tenth of a percent would take
#: most of the time.
_LIMITED_GAP = 5e-3
#: Of the solver's time for a mesh, what one of these problems gets at the most.
_LIMITED_SHARE = 0.1
#: Plans whose times differ by no more are close.
_CLOSE = 0.03
#: Plans whose times differ by no more are as good as one another: the simplest of them is taken. It is less than a prediction
#: is off by, and who runs the simpler plan has fewer collectives to understand.
_TIE = 5e-3
#: How close to its optimum such a plan is looked for.
_TIE_GAP = 5e-4
#: A mesh that promises a plan slower by more has never been the fastest by other prices.
_FAR = 0.1

#: Nodes of a program, by meshes besides the first: from there on, planning takes long enough for copies of this process to
#: take some of the meshes. How long a copy may do nothing, besides waiting for a solver, before it counts as hung.
_WORTH_COPIES, _PATIENCE_S = 4000, 30.0

#: How much slower a plan may be predicted for holding to metadata that are a hint.
_HINT_TOLERANCE = 0.05


def plan_program(
    program: Program,
    *,
    metadata: Metadata = "pin",
    logical_axis_rules: Rules | None = None,
    like: Plan | None = None,
    cache: bool | str | os.PathLike[str] | None = False,
    **options: Any,
) -> Plan:
    """The plan of a traced program; options are those of `plan_step.plan`.

    Raises:
        AutoparError: one of its subclasses, naming what to change.
    """
    if like is not None:
        options = options_like(like, options)
    meshes = asked_meshes(options.get("mesh"), options.get("num_devices"))
    shared = Told()
    if like is not None:
        check_mesh_like(like, meshes[0])
        shared = told_by_plan(like, program)
    own = told_by_metadata(program, metadata, logical_axis_rules, meshes, mesh_given=options.get("mesh") is not None)
    is_hint = metadata == "hint" and bool(own.pins)
    folder = plan_cache.folder_of(cache)
    if folder is None:
        return _plan_told(program, own, shared, options, is_hint=is_hint)
    asked = _asked(options) | {
        "meshes": meshes,
        "hardware": asked_profile(options.get("hardware")),
        "told by metadata": (own, is_hint),
        "told by a plan": shared,
    }
    return plan_cache.kept(
        program, asked, folder, lambda: _plan_told(program, own, shared, options, is_hint=is_hint), Plan.from_json
    )


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are not what they are by default, but for those that are read for what they mean."""
    given = [p for f in (_plan_and_parts, _plan_in_parts) for p in inspect.signature(f).parameters.values()]
    usual = {parameter.name: parameter.default for parameter in given}  # said or not, the same is asked for
    known = ("mesh", "num_devices", "hardware", "progress")
    return {name: value for name, value in options.items() if name not in known and value != usual.get(name, options)}


def _plan_told(program: Program, own: Told, shared: Told, options: Mapping[str, Any], *, is_hint: bool) -> Plan:
    """A plan that holds to what metadata and another plan have said.

    Args:
        own: by metadata. is_hint: it need not be held to.
    """

    def planned(own: Told) -> Plan:
        plan = _plan_in_parts(program, told={**own.pins, **shared.pins}, **options)
        return replace(plan, notes=(*plan.notes, *own.notes, *shared.notes))

    if is_hint:
        return _plan_with_hint(lambda: planned(own), lambda: planned(replace(own, pins={})))
    try:
        return planned(own)
    except PinError as error:
        if not any(repr(path) in str(error) for path in own.pins):
            raise
        raise PinError(f'{error}. It stands on the argument as metadata: `metadata="ignore"` plans without') from None


def _plan_with_hint(hinted: Callable[[], Plan], free: Callable[[], Plan]) -> Plan:
    """The plan that holds to the metadata, unless that cannot be or one without is faster by more than a little."""
    other = free()
    try:
        plan = hinted()
    except (PinError, BudgetError) as error:
        return replace(other, notes=(*other.notes, f"metadata of the arguments were not held to: {error}"))
    fastest_s = other.prediction.step_time_s  # 0 of a step that computes nothing
    slower = plan.prediction.step_time_s / fastest_s - 1 if fastest_s else 0.0
    if slower <= _HINT_TOLERANCE:
        return replace(plan, notes=(*plan.notes, f"held to the metadata of the arguments, at {slower:+.1%} step time"))
    return replace(other, notes=(*other.notes, f"holding to the metadata of the arguments would cost {slower:+.1%}"))


def _plan_in_parts(
    program: Program,
    *,
    num_microbatches: int | Literal["auto"] = 1,
    per_microbatch_statistics: bool = False,
    **options: Any,
) -> Plan:
    def planned(count: int) -> Plan:
        return plan_in_microbatches(program, count, own_statistics=per_microbatch_statistics, **options)

    if num_microbatches == "auto":
        return fastest_that_fits(planned, lambda: num_examples(program.as_traced.graph))
    if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
        raise MicrobatchError(f'`num_microbatches` is {num_microbatches!r}: give 1 or more, or "auto"')
    try:
        return planned(num_microbatches)
    except NothingFitsError as short:
        raise short.told(split_over_time=num_microbatches == 1) from None


def plan_in_microbatches(program: Program, count: int, *, own_statistics: bool = False, **options: Any) -> Plan:
    """`plan_program` for one number of microbatches, by who plans again where nothing fits.

    Args:
        options: of `plan_program`, and `any_that_fits`: where memory is short, the first plan found that fits will do.

    Raises:
        NothingFitsError: nothing does; the ways out are not priced yet, which takes planning of its own.
    """
    split = program.as_traced.in_microbatches(count, own_statistics=own_statistics)
    return _plan_and_parts(split, may_copy=True, **options)[0]


def plan_and_parts(program: Program, **options: Any) -> tuple[Plan, Made]:
    """`plan_in_microbatches` of a program as it is, and what the plan was made of.

    Raises:
        NothingFitsError: as there.
    """
    plan, made = _plan_and_parts(program, may_copy=False, **options)
    assert made is not None, "all was planned in this process"
    return plan, made


@seldom_collect()
def _plan_and_parts(
    program: Program,
    *,
    may_copy: bool,
    mesh: str | MeshShape | jax.sharding.Mesh | None = None,
    num_devices: int | None = None,
    hardware: str | HardwareProfile | None = None,
    memory_budget_bytes: float | None = None,
    pin: Mapping[str, Any] | None = None,
    told: Mapping[str, Any] | None = None,
    rematerialize: bool = True,
    dims_as_written: bool = False,
    any_that_fits: bool = False,
    held: Mapping[int, TensorSharding] | None = None,
    solver: Solver | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> tuple[Plan, Made | None]:
    """The plan, and what it was made of, unless that was in a copy of this process.

    Args:
        may_copy: copies of this process may plan too.
        held: of a program of one form, of which nothing is to be computed again: values, and how they must be made.
    """
    layouts = {**(told or {}), **(pin or {})}
    report = progress or (lambda stage, fraction: None)
    profile = asked_profile(hardware)
    meshes = meshes_with_pinned_axes(meshes_of_program(asked_meshes(mesh, num_devices), program.graph), layouts)
    budget = profile.usable_bytes if memory_budget_bytes is None else float(memory_budget_bytes)
    solve_with = solver or Ilp(time_limit_s=time_limit_s)
    limited = solver or Ilp(time_limit_s=_LIMITED_SHARE * time_limit_s, relative_gap=_LIMITED_GAP)
    near = solver or Ilp(time_limit_s=_LIMITED_SHARE * time_limit_s, relative_gap=_TIE_GAP)
    distinct, twins = distinct_meshes(meshes, profile, symmetric=not layouts and not _names_axes(program.graph))
    one = resolve_pins(layouts, program.graph, distinct[0])
    forms = [(form, _group(form.graph, one)) for form in program.forms[-1 if dims_as_written else 0 :]]
    search = {"rematerialize": rematerialize, "any_that_fits": any_that_fits, "time_limit_s": time_limit_s}
    keep_to = budget * (1 - BUDGET_MARGIN)

    def task(shape: MeshShape) -> _Task:
        pins = resolve_pins(layouts, program.graph, shape)
        return _Task(profile, keep_to, pins, solve_with, limited, near, search, held or {})

    tasks = [(shape, task(shape)) for shape in distinct]
    is_long = len(program.graph.nodes) * (len(distinct) - 1) >= _WORTH_COPIES
    most = len(distinct) if may_copy and is_long else 1
    on_meshes = _OnMeshes(tasks, forms, report)
    with lanes(on_meshes.answer, most, patience_s=time_limit_s + _PATIENCE_S) as team:
        ends = on_meshes.planned(team)
        if not any(end.plan for end in ends):
            raise on_meshes.failure
    report("done", 1.0)
    best = _simplest_end([end for end in ends if end.plan is not None])
    assert best.plan is not None
    plan = replace(
        best.plan,
        memory_budget_bytes=memory_budget_bytes,
        rejected=_rejected(best.plan, dict(zip(distinct, ends, strict=True)), twins),
        pins={path: str(spec) for path, spec in (pin or {}).items()},
        dims_as_written=dims_as_written,
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )
    return plan, best.made


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


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked of the plan on one mesh.

    Args:
        budget: bytes, without the margin. limited: the solver of problems with a limit of memory, or with prices that
            are a guess. near: of those for a plan that is simpler than another, and hardly slower.
        search: how `within_budget` is to search.
    """

    profile: HardwareProfile
    budget: float
    pins: dict[int, TensorSharding]
    solver: Solver
    limited: Solver
    near: Solver
    search: Mapping[str, Any]
    held: Mapping[int, TensorSharding]


@dataclass(frozen=True, slots=True)
class _Start:
    """The plan on one mesh before memory and overlap are looked at: what it costs tells whether the mesh is worth more.

    Args:
        forms: the program's that are left, should nothing of this one fit. seconds: taken so far.
    """

    mesh: MeshShape
    program: Program
    grouped: _Grouped
    forms: Sequence[tuple[Program, _Grouped]]
    task: _Task
    made: Made
    seconds: float

    @property
    def promise(self) -> float:
        """Its time; of two that are close, the one with fewer axes is planned sooner."""
        axes = sum(size > 1 for size in self.mesh.axis_sizes)
        return self.made.compared_s * (1 + _CLOSE * axes)

    @classmethod
    def of(cls, mesh: MeshShape, forms: Sequence[tuple[Program, _Grouped]], task: _Task) -> _Start:
        """Of the step that sees dims as two where that is split between these; else of the step as it was written, which
        can be split in ways that the other cannot.

        Args:
            forms: with the step as it was written last.

        Raises:
            TimeLimitError: the solver found no plan.
        """
        (program, grouped), *others = forms
        started = time.perf_counter()
        f = _formulated(mesh, program, grouped, task)
        made = _planning(task).made(program, f, task.solver.solve(f.problem))
        if others and not sees_two(program.trace, split_dims(made.parts.constraints)):
            return cls.of(mesh, others, task)
        return cls(mesh, program, grouped, others, task, made, time.perf_counter() - started)

    def finished(self, fastest: Least, least_promise: float) -> tuple[Plan, Made, _Fastest]:
        """The plan with as little exposed as can be, that keeps to the budget; what it was made of; and of the plans here the
        fastest, which is another where a simpler one is as good.

        Args:
            fastest: seconds of the fastest so far; a plan that cannot be faster is left as it is.
            least_promise: of all meshes.

        Raises:
            NothingFitsError: nothing fits.
        """
        try:
            return self._finished(fastest, least_promise)
        except NothingFitsError:
            if not self.forms:
                raise
        return _Start.of(self.mesh, self.forms, self.task).finished(fastest, least_promise)

    def _finished(self, fastest: Least, least_promise: float) -> tuple[Plan, Made, _Fastest]:
        started, budget, planning = time.perf_counter(), self.task.budget, _planning(self.task)
        tried = self._hidden(fastest, least_promise)
        free = min(tried, key=_compared_s)
        begun_fits, memory_bound = self.made.peak_bytes <= budget, free.peak_bytes > budget
        if memory_bound and not begun_fits and least_s(free) < fastest.value:
            try:  # only now is memory worth its constraints
                limited = within_budget(budget, free, planning, **self.task.search, fastest=fastest)
                tried.append(best_hidden(limited, budget, fastest.value))
            except NothingFitsError:
                if all(one.peak_bytes > budget for one in tried):
                    raise
        best = min(tried, key=lambda one: (one.peak_bytes > budget, one.compared_s))
        made = self._simplest(best, tried, fastest.value)
        seconds = self.seconds + time.perf_counter() - started
        plan = plan_as_made(
            made, self.program, self.grouped.unknown, budget=budget, seconds=seconds, memory_bound=memory_bound
        )
        return plan, made, _Fastest.of(min(best, made, key=_compared_s))

    def _simplest(self, best: Made, tried: Sequence[Made], to_beat: float) -> Made:
        """Of the plans that fit and are as good as the fastest, the one that splits the fewest arguments; where that may
        be, one that keeps all of the state whole.

        Args:
            best: the fastest that fits. to_beat: seconds of the fastest on any mesh so far.
        """
        budget, limit_s = self.task.budget, (1 + _TIE) * min(best.compared_s, to_beat)
        if self.task.search["any_that_fits"] or best.compared_s > limit_s or best.peak_bytes > budget:
            return best
        most_s = (1 + _TIE) * best.step_time_s  # the figure that users see differs by no more either
        able = (one for one in (*tried, *self._with_whole_state(best, limit_s)) if one.peak_bytes <= budget)
        near = [one for one in able if one.compared_s <= limit_s and one.step_time_s <= most_s]
        return min(near, key=lambda one: (num_split(one.parts.inputs), one.compared_s), default=best)

    def _with_whole_state(self, best: Made, limit_s: float) -> list[Made]:
        """The fastest plan of the same program that splits no parameter and no optimizer state but those that are pinned,
        if it fits and may take no longer than `limit_s`."""
        f, task, made_in = best.formulation, self.task, best.formulation.value_made
        state = [n for n, tensor in enumerate(best.parts.inputs) if tensor.role != "data" and n not in task.pins]
        if not any(any(best.parts.inputs[n].sharding.dims) for n in state):
            return []
        if sum(f.graph.values[f.graph.inputs[n]].num_bytes for n in state) > task.budget:
            return []
        costs = [one.copy() for one in f.problem.node_costs]
        for value in (f.graph.inputs[n] for n in state if n in f.input_decision):
            decision, shardings = made_in[value]
            costs[decision][[any(sharding.dims) for sharding in shardings]] = np.inf
            if not np.isfinite(costs[decision]).any():
                return []
        problem = replace(f.problem, node_costs=tuple(costs), usages=(), memory_limit=None)
        solution = task.near.solve(problem)
        if len(solution.choices) != len(f.decisions) or problem.evaluate(solution.choices) == math.inf:
            return []
        if solution.cost > (1 + _TIE) * best.solution.cost:
            return []  # the solver sees a difference that overlap or the launch of kernels may only hide
        # What is known of the best there can be was found with nothing kept whole.
        told = replace(solution, lower_bound=min(best.solution.lower_bound, solution.cost), status=best.solution.status)
        made = _planning(task).made(best.program, f, told, best.recomputed)
        if least_s(made) > limit_s:
            return []
        hidden = best_hidden(made, task.budget, limit_s)
        return [hidden] if hidden.peak_bytes <= task.budget else []

    def _hidden(self, fastest: Least, least_promise: float) -> list[Made]:
        """The plan as it was begun, and others by prices that count on overlap, each with as little exposed as can be."""
        task, seen = self.task, {self.made.solution.choices}

        def other(exposed: Prices, to_beat: float) -> Made | None:
            f = _formulated(self.mesh, self.program, self.grouped, task, exposed)
            solution = task.limited.solve(f.problem)  # for prices that are a guess, near the optimum will do
            if not solution.choices or solution.choices in seen:
                return None
            seen.add(solution.choices)
            return best_hidden(_planning(task).made(self.program, f, solution), task.budget, to_beat)

        begun = best_hidden(self.made, task.budget, fastest.value)
        if self.promise > (1 + _FAR) * least_promise:
            return [begun]
        short = begun.peak_bytes > task.budget  # memory will be what costs, not what is exposed
        return [begun, *counting_on_overlap(begun, other, fastest.value, at_once=short)]


@dataclass(frozen=True, slots=True)
class _Fastest:
    """What a tie tells of the fastest plan: seconds by what plans are compared, and what it is."""

    compared_s: float
    step_time_s: float
    mesh: MeshShape
    words: str
    num_split: int

    @classmethod
    def of(cls, made: Made) -> _Fastest:
        inputs, f = made.parts.inputs, made.formulation
        words = strategy_words(f, made.solution.choices, inputs)
        return cls(made.compared_s, made.step_time_s, f.mesh, words, num_split(inputs))


@dataclass(frozen=True, slots=True)
class _End:
    """What planning on a mesh ended with.

    Args:
        fits: whether the plan keeps to the budget. compared_s: by what plans are compared.
        fastest: of the plans on this mesh; another than the plan where that is as good and simpler.
        made: what the plan was made of.
        failure: why there is no plan.
    """

    plan: Plan | None = None
    fits: bool = False
    compared_s: float = math.inf
    made: Made | None = None
    failure: str = ""
    fastest: _Fastest | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process, without what only this one can hold."""
        plan = None if self.plan is None else replace(self.plan, in_tree=None, out_tree=None)
        return _End, (plan, self.fits, self.compared_s, None, self.failure, self.fastest)


def _simplest_end(ends: Sequence[_End]) -> _End:
    """Of the ends on all meshes whose plans fit and are as good as the fastest, the one whose plan splits the fewest arguments,
    over the fewest axes. Its plan tells of the fastest, where that is another."""
    ends = [end for end in ends if end.fits] or ends
    known = [end.fastest for end in ends if end.fastest is not None]
    fastest = min(known, key=lambda one: one.compared_s)

    def simplicity(end: _End) -> tuple[bool, int, int, float]:
        assert end.plan is not None
        axes, own_s = sum(size > 1 for size in end.plan.mesh.axis_sizes), end.plan.prediction.step_time_s
        slower = end.compared_s > (1 + _TIE) * fastest.compared_s or own_s > (1 + _TIE) * fastest.step_time_s
        return slower, num_split(end.plan.inputs), axes, end.compared_s

    best = min(ends, key=simplicity) if any(end.fits for end in ends) else min(ends, key=lambda end: end.compared_s)
    assert best.plan is not None
    if best.compared_s <= fastest.compared_s:
        return best
    faster = 1 - fastest.compared_s / best.compared_s
    tie = Tie(mesh=fastest.mesh, words=fastest.words, num_split=fastest.num_split, faster=faster)
    return replace(best, plan=replace(best.plan, tie=tie))


#: A mesh's position; None to begin its plan, or, to end it, the least that any mesh promises.
_Request = tuple[int, float | None]


class _OnMeshes:
    """The plans on several meshes, as far as this process makes them; meshes go by their positions."""

    def __init__(
        self,
        tasks: Sequence[tuple[MeshShape, _Task]],
        forms: Sequence[tuple[Program, _Grouped]],
        report: Progress,
    ) -> None:
        self._tasks, self._forms, self._report = tasks, forms, report
        self._process = os.getpid()
        self._starts: dict[int, _Start] = {}
        self._failures: dict[int, NothingFitsError] = {}
        self._fastest = Least()

    def planned(self, team: Sequence[Lane[_Request, Any]]) -> list[_End]:
        """How each ended. All are begun before any is improved: the most promising then spare others the trouble."""
        begun = spread(team, [(i, None) for i in range(len(self._tasks))])
        least = min(promise for _, promise in begun.values())
        by_lane: dict[int, list[_Request]] = {}
        for (i, _), (lane, _) in sorted(begun.items(), key=lambda one: one[1][1]):
            by_lane.setdefault(lane, []).append((i, least))
        near = {i for (i, _), (_, promise) in begun.items() if promise <= (1 + _FAR) * least}
        finished = each_its_own(team, by_lane, lambda request: request[0] in near)  # worth beginning once more
        ends = {i: end for (i, _), (_, end) in finished.items()}
        return [ends[i] for i in range(len(self._tasks))]

    def answer(self, request: _Request) -> float | _End:
        """What a mesh promises, in seconds; or, to the end, what came of it."""
        i, least_promise = request
        mesh, task = self._tasks[i]
        if i not in self._starts:
            self._tell(f"plan {mesh}", 0.1 + 0.6 * i / len(self._tasks))
            self._starts[i] = begun = _Start.of(mesh, self._forms, task)
            if begun.made.peak_bytes <= task.budget:
                self._fastest.lower(begun.made.compared_s)
        start = self._starts[i]
        if least_promise is None:
            return start.promise
        self._tell(f"improve {mesh}", 0.7 + 0.3 * i / len(self._tasks))
        try:
            plan, made, fastest = start.finished(self._fastest, least_promise)
        except NothingFitsError as short:
            self._failures[i] = short
            return _End(failure=str(short))
        fits = made.peak_bytes <= task.budget
        if fits:
            self._fastest.lower(fastest.compared_s)
        return _End(plan, fits, made.compared_s, made, fastest=fastest)

    @property
    def failure(self) -> NothingFitsError:
        """Why nothing fits on the first mesh, with the ways out."""
        if 0 not in self._failures:  # a copy found it out
            self.answer((0, math.inf))
        return self._failures[0]

    def _tell(self, stage: str, fraction: float) -> None:
        if os.getpid() == self._process:  # whom the user asked
            self._report(stage, fraction)


def _formulated(
    mesh: MeshShape, program: Program, grouped: _Grouped, task: _Task, exposed: Prices | None = None
) -> Formulation:
    """The problem without a limit of memory.

    Args:
        exposed: what counts of collectives for which nothing need wait.
    """
    return formulate(
        program.graph,
        grouped.groups,
        mesh,
        task.profile,
        pins=task.pins,
        memory_budget_bytes=None,
        resharding=ReshardingTimes(mesh, task.profile, exposed),
        held=task.held,
    )


def _compared_s(made: Made) -> float:
    return made.compared_s


def _planning(task: _Task) -> Planning:
    return Planning(task.pins, task.solver, task.limited, lambda graph: _group(graph, task.pins).groups, task.held)


def plan_as_made(
    made: Made,
    program: Program,
    unknown: Counter[str],
    *,
    budget: float,
    seconds: float,
    memory_bound: bool = False,
) -> Plan:
    """The plan of an assignment.

    Args:
        program: that was planned, before anything in it was computed again.
        unknown: primitives without a rule, and how often they are used.
        budget: bytes. seconds: that planning took.
    """
    parts, solution, graph = made.parts, made.solution, made.formulation.graph
    check_explicit(parts.explicit, graph)
    mesh, own_rates = made.formulation.mesh, replace(made.formulation.profile, xla_estimator=None)
    return Plan(
        program=program.signature,
        mesh=mesh,
        hardware=made.formulation.profile.name,
        memory_budget_bytes=budget,
        words=strategy_words(made.formulation, solution.choices, parts.inputs),
        inputs=parts.inputs,
        outputs=parts.outputs,
        carried=graph.carried,
        donated=program.donated,
        constraints=parts.constraints,
        decisions=parts.decisions,
        collectives=parts.collectives,
        regions=parts.regions,
        microbatches=microbatches_of(made.program, mesh, parts.constraints),
        recomputed=made.recomputed,
        merge_bytes=parts.merge_bytes,
        awaited=named(graph, parts.awaited),
        separate=separate_sums(graph, parts.device),
        replicated=_replicated(graph, parts.device, unknown, mesh, own_rates),
        prediction=parts.prediction,
        trace=step_trace(graph, parts.device, parts.timeline),
        memory=memory_over_step(graph, parts.device, parts.most_held, parts.timeline, mesh, own_rates),
        outcome=_outcome(solution, made.formulation, seconds, memory_bound),
        notes=(*_notes(graph, mesh, unknown, parts.inputs), *microbatch_notes(program, mesh)),
        versions=versions_of(),
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )


def rules_of(graph: Graph) -> tuple[tuple[Rule, ...], Counter[str]]:
    """A rule per node, and the primitives that have none, or none that can be used."""
    unknown: Counter[str] = Counter()

    def of(view: NodeView) -> tuple[Rule, str]:
        rule = rule_for(view)
        return rule or unknown_rule(view), called(view) if rule is None or needs_local(view) else ""

    known = of_each_node(graph, of)
    for node, (_, lacking) in zip(graph.nodes, known, strict=True):
        if lacking:
            unknown[lacking] += not node.effect
    return tuple(rule for rule, _ in known), unknown


def _lacks_rule(view: NodeView) -> bool:
    return rule_for(view) is None or needs_local(view)


def _replicated(
    graph: Graph, device: DeviceProgram, unknown: Counter[str], mesh: MeshShape, own_rates: HardwareProfile
) -> tuple[Replicated, ...]:
    """What has no rule, and what it takes; nothing where there is one device."""
    if mesh.num_devices == 1 or not unknown:
        return ()
    seconds = seconds_by_node(device, mesh, own_rates)
    nodes: dict[str, list[int]] = {}
    for n, node in enumerate(graph.nodes):
        view = NodeView.of(node, graph)
        if not node.effect and (name := called(view)) in unknown and _lacks_rule(view):
            nodes.setdefault(name, []).append(n)
    found = [
        Replicated(
            name=name,
            count=len(those),
            time_s=sum(seconds.get(n, 0.0) for n in those),
            source=graph.nodes[those[0]].source,
        )
        for name, those in nodes.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.time_s, one.name)))


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
    axes = [(a, s) for a, s in mesh.size_of.items() if s > 1]
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


def asked_meshes(mesh: Any, num_devices: int | None) -> tuple[MeshShape, ...]:
    """The meshes to plan for, all of as many devices.

    Raises:
        MeshError: the two disagree, or a mesh cannot be read.
    """
    if mesh is None:
        return factorisations(jax.device_count() if num_devices is None else num_devices)
    if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        shape = MeshShape(tuple(mesh.axis_names), tuple(mesh.axis_sizes))
    else:
        shape = mesh_of(mesh)
    if num_devices is not None and shape.num_devices != num_devices:
        raise MeshError(
            f"mesh {shape.describe()} has {shape.num_devices} devices, but {num_devices} were asked for:"
            " give one of the two, or make them agree"
        )
    return (shape,)


def distinct_meshes(
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
    best: Plan, ends: Mapping[MeshShape, _End], twins: Mapping[MeshShape, MeshShape]
) -> tuple[RejectedMesh, ...]:
    plans = [end.plan for end in ends.values() if end.plan is not None]
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
        RejectedMesh(mesh=mesh, step_time_s=float("inf"), peak_bytes=float("inf"), words=end.failure)
        for mesh, end in ends.items()
        if end.failure
    ]
    return tuple(out)


def asked_profile(hardware: str | HardwareProfile | None) -> HardwareProfile:
    """The profile of a name, or of the visible devices."""
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is None:
        device = jax.devices()[0]
        hardware = hardware_profiles.detect(device.device_kind, device.platform)
    return hardware_profiles.load(hardware)
