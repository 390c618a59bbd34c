"""Plan a traced step as pipeline stages.

    Program -> Cuttable -> layers -> costs of their runs -> stages, schedule, microbatches -> a Plan for each stage

In: a `Program` and a request.
Out: a `PipelinePlan`. Nothing is compiled and no device is used.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.errors import BudgetError, ClusterError, MicrobatchError, ScheduleError
from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.branches import forked_layers
from autopar.pipeline.cut.exchanges import exchanges_of
from autopar.pipeline.cut.stage_programs import Cuttable, StageProgram
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.partition.cluster import Cluster, SubmeshShape
from autopar.pipeline.partition.cluster_layers import Clustering, cheapest_cuts, repeated_layers
from autopar.pipeline.partition.problem import Partitioner
from autopar.pipeline.plan import LeafPart, PipelinePlan, PipelinePrediction, SearchOutcome, StagePlan, StagesTried
from autopar.pipeline.schedule.table import find
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.pipeline.search.branch_search import BranchSearch
from autopar.pipeline.search.microbatch_search import divisors, over_microbatches
from autopar.pipeline.search.searches_by_microbatches import Searches, Units
from autopar.pipeline.search.stage_costs import STATE_PRICES, PlannedRun, StageCosts, likely_shapes
from autopar.pipeline.search.stage_search import SCHEDULES, Outcome, StagedStep, StageSearch
from autopar.planner.efficiency import efficiency_of
from autopar.planner.memory_budget import MARGIN, MemoryBudget
from autopar.plans.records import TensorPlan
from autopar.system.gc_pause import seldom_collect
from autopar.system.units import human_bytes
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program
from autopar.version import versions_of

#: The first number of microbatches to try has about so many per device, and at least so many examples per microbatch:
#: with fewer microbatches stages wait, with fewer examples kernels are small.
_FIRST_PER_DEVICE, _FIRST_EXAMPLES = 8, 4
#: The most layers of a step: enough for 48 equal blocks, one layer each, and layers before and after them.
_MOST_LAYERS = 64
#: Units that repeat have prices of their own if the plans of all of them have at most so many equations together.
_MOST_PLANNED = 16_000
#: The most layers of a step whose units have prices of their own, and the parts that are each rematerialized together.
_MOST_TIMED, _REMATERIALIZED_PARTS = 96, 16
#: How far borders of stages are moved, one after the other, as shares of the time of all units.
_WINDOWS = (0.06, 0.015, 0.004)
#: A chain and stages that fork are both planned if their step times are within this factor.
_CLOSE = 1.1
#: How often the search is repeated when the planned stages exceed their estimated memory.
_MOST_REPLANS = 2
#: The time limit of one schedule's partition.
_SEARCH_LIMIT_S = 60.0

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A request for stages.

    Args:
        profiles: the hardware profile of each kind of device in the cluster.
        memory_budget_bytes: bytes per device; None for the profile's usable memory.
        partitioner: by default `ExactPartitioner` or `InterleavedPartitioner`, which prove optimality by their costs.
        planning: options of `planner.plan_and_parts` for each stage.
    """

    cluster: Cluster
    profiles: Mapping[str, HardwareProfile]
    stages: int | Literal["auto"] = "auto"
    num_microbatches: int | Literal["auto"] = "auto"
    schedule: str = "auto"
    own_statistics: bool = False
    memory_budget_bytes: float | None = None
    partitioner: Partitioner | None = None
    planning: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None

    @property
    def budgets(self) -> dict[str, float]:
        """The memory budget of a device of each kind."""
        given = self.memory_budget_bytes
        return {kind: MemoryBudget(given or p.usable_bytes).plan_bytes for kind, p in self.profiles.items()}


@seldom_collect()
def plan_stages(program: Program, request: StageRequest) -> PipelinePlan:
    """Partition a step into stages and plan each.

    Raises:
        MicrobatchError: the batch cannot be split into the requested microbatches.
        BudgetError: nothing fits.
        ClusterError, ScheduleError: the request is impossible.
    """
    return _Planning(program, request).run()


def searches_of(cuttable: Cuttable, request: StageRequest) -> Searches:
    """The searches of a step that `plan_stages` uses."""
    clustering, units = _layers(cuttable, request)
    return Searches(
        cuttable,
        clustering,
        units,
        request.cluster,
        request.profiles,
        request.budgets,
        _SEARCH_LIMIT_S,
        num_stages=None if request.stages == "auto" else request.stages,
        planning=request.planning,
    )


def _layers(cuttable: Cuttable, request: StageRequest) -> tuple[Clustering, Units | None]:
    """The layers of a step, and its units if each has a price of its own.

    That is more exact, and borders of stages may be anywhere, but a plan of all units for each shape of submesh takes longer
    than plans of repeated layers.
    """
    chain = cuttable.chain
    cuts, num_units = [0.0, *chain.cut_bytes], len(chain.units)
    repeated = repeated_layers(chain.flops, cuts, most_layers=_MOST_LAYERS)
    if repeated is not None and repeated.repeats(num_units):
        sizes = (cuttable.flow.units[i] for i in chain.units)
        num_plans = len(STATE_PRICES) * len(likely_shapes(request.cluster))
        if cuttable.stacks or num_plans * sum(unit.stop - unit.start for unit in sizes) > _MOST_PLANNED:
            return repeated, None
    _, count = _numbers(cuttable, request)
    layers, together = cuttable.layers(range(num_units), count), (0,) * num_units
    prices = StageCosts(layers, request.profiles, range(num_units), together=together)
    seconds = prices.layers_s(SubmeshShape(request.cluster.kinds[0], 1, 1))
    least = 1 if request.stages == "auto" else min(request.stages, num_units)
    parts = cheapest_cuts(seconds, cuts, _REMATERIALIZED_PARTS).layers(num_units)
    together = tuple(part for part, layers in enumerate(parts) for _ in layers)
    return cheapest_cuts(seconds, cuts, _MOST_TIMED, least), Units(tuple(seconds), together)


def _bounds(stages: Sequence[StagePlan], timeline: PipelineTimeline) -> dict[str, float]:
    """Seconds of a step by bottleneck: bubbles, and the bottlenecks of the stages' programs by device time."""
    waiting = timeline.bubble_fraction * timeline.makespan_s
    seconds: dict[str, float] = defaultdict(float)
    for stage in stages:
        for bound, time_s in stage.plan.efficiency.bound_s.items() if stage.plan.efficiency else ():
            seconds[bound] += time_s * stage.plan.num_devices
    scale = (timeline.makespan_s - waiting) / (sum(seconds.values()) or 1.0)
    found = {"pipeline bubbles": waiting, **{bound: scale * time_s for bound, time_s in seconds.items()}}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def likely_numbers(cuttable: Cuttable, cluster: Cluster) -> tuple[tuple[int, ...], int]:
    """The possible numbers of microbatches, and the first to try."""
    if cuttable.refusal is not None:
        return (1,), 1
    examples = num_examples(cuttable.flow.graph)
    numbers = divisors(examples)
    wanted = min(_FIRST_PER_DEVICE * cluster.num_devices, examples / _FIRST_EXAMPLES)
    return numbers, min(numbers, key=lambda number: abs(math.log(number / wanted)))


def _numbers(cuttable: Cuttable, request: StageRequest) -> tuple[Sequence[int], int]:
    """The numbers of microbatches to try, and the first."""
    count = request.num_microbatches
    if count == "auto":
        return likely_numbers(cuttable, request.cluster)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise MicrobatchError(f'`num_microbatches` is {count!r}: give 1 or more, or "auto"')
    return (count,), count


class _Planning:
    """Plans one step."""

    def __init__(self, program: Program, request: StageRequest) -> None:
        self.request, self.started = request, time.perf_counter()
        traced = program.as_traced
        self.program = traced.whole or traced
        self.report = request.progress or (lambda stage, fraction: None)
        self.report("layers", 0.0)
        self.cuttable = Cuttable.of(program, own_statistics=request.own_statistics)
        self._check_request()
        self.searches = searches_of(self.cuttable, request)
        self.branches = self._branches()
        self.tried: list[StagesTried] = []
        #: The best chain and the best forking stages, by whether they fork: the number of microbatches, the step, and the
        #: searches whose layers it has.
        self.best: dict[bool, tuple[int, StagedStep, Searches]] = {}

    def run(self) -> PipelinePlan:
        numbers, start = _numbers(self.cuttable, self.request)
        tried = over_microbatches(self._search, numbers, start, self._found, self._estimate)
        best = tried[0]
        if best.outcome.step is None:
            budget = " or ".join(sorted({human_bytes(b) for b in self.request.budgets.values()}))
            counts = ", ".join(str(one.num_microbatches) for one in tried)
            raise BudgetError(
                f"no stages of `{self.program.signature.name}` fit {budget} per device of {self.request.cluster}"
                f" ({len(self.searches.clustering.starts)} layers, numbers of microbatches tried: {counts})."
                f" {best.outcome.reason}. Use more devices, another schedule, or a larger memory budget"
            )
        self._move_cuts()
        self.report("plan stages", 0.9)
        plans: list[PipelinePlan] = []
        failures: list[BudgetError] = []
        close = [one for one in self.best.values() if one[1].step_time_s <= _CLOSE * best.step_time_s]
        for count, step, self.searches in close:
            try:
                plans.append(self._within(count, step))
            except BudgetError as error:
                failures.append(error)
        if not plans:
            raise failures[0]
        self.report("done", 1.0)
        return min(plans, key=lambda plan: plan.prediction.step_time_s)

    def _move_cuts(self) -> None:
        """Move the borders of the best stages by single units, where that makes the step faster."""
        if self.request.partitioner is not None or False not in self.best:
            return
        for window in _WINDOWS:
            count, step, searches = self.best[False]
            finer = searches.near(step.stages, window) if len(step.stages) > 1 else None
            if finer is None:
                return
            self.report("borders of stages", 0.88)
            shapes = tuple(dict.fromkeys(stage.submesh.shape for stage in step.stages))
            found = finer.search(count, shapes).outcome((step.schedule.name,)).step
            if found is not None and found.step_time_s < step.step_time_s:
                self.best[False] = count, found, finer

    def _within(self, count: int, step: StagedStep) -> PipelinePlan:
        """The plan of these stages. If they exceed the budget once planned, search again with a smaller budget."""
        budgets = self.request.budgets
        plan, over = self._plan(count, step)
        for _ in range(_MOST_REPLANS):
            if over <= 1:
                break
            self.report("stages that hold less", 0.9)
            budgets = {kind: size / over for kind, size in budgets.items()}
            search = replace(self.searches.search(count), budget_bytes=budgets)
            found = [one.step for _, one in self._outcomes(search) if one.step is not None]
            if not found:
                break
            plan, over = self._plan(count, min(found, key=lambda step: step.step_time_s))
        if over * (1 - MARGIN) > 1:
            raise BudgetError(
                f"no stages of `{self.program.signature.name}` fit: the best need"
                f" {human_bytes(plan.prediction.peak_bytes)} on a device of {self.request.cluster},"
                f" {over * (1 - MARGIN):.2f} times the memory budget. Use more devices or microbatches, or a larger budget"
            )
        return plan

    def _check_request(self) -> None:
        """Refuse more stages than devices, and a forward-only schedule for a step with a backward pass."""
        num_devices = self.request.cluster.num_devices
        if self.request.stages != "auto" and self.request.stages > num_devices:
            raise ClusterError(
                f"{self.request.stages} stages were requested, and {num_devices} device{'s' * (num_devices > 1)} can have"
                f" at most {num_devices}: choose 1 to {num_devices}"
            )
        if self.request.schedule == "auto":
            return
        kind = find(self.request.schedule)
        if kind.backward == "none" and self.cuttable.flow.backward:
            raise ScheduleError(
                f"schedule {kind.name!r} runs forward passes only, but `{self.program.signature.name}` has a backward"
                " pass: its gradients and updates would never be computed. Leave schedule='auto', or choose one"
                f" of {', '.join(map(repr, SCHEDULES))}"
            )

    # -- the search --------------------------------------------------------------------------

    def _search(self, count: int, among: Sequence[SubmeshShape] | None) -> StageSearch:
        self.report(f"stages for {count} microbatches", min(0.85, 0.05 + 0.1 * len(self.searches.costs)))
        return self.searches.search(count, among)

    def _estimate(self, count: int, known: int, among: Sequence[SubmeshShape]) -> StageSearch | None:
        """An estimating search for the default partitioner; None for other partitioners, which run a full search."""
        if self.branches is not None or self.request.partitioner is not None:
            return None
        return self.searches.estimate(count, known, among)

    def _found(self, search: StageSearch) -> Outcome:
        """The best result of all schedules. The result of each schedule is added to `tried`."""
        best = Outcome(None)
        for name, found in self._outcomes(search):
            step = found.step
            self.tried.append(
                StagesTried(
                    schedule=name,
                    num_stages=len(step.stages) if step else 0,
                    num_microbatches=search.num_microbatches,
                    step_time_s=step.step_time_s if step else math.inf,
                    peak_bytes=max(step.peak_bytes) if step else math.inf,
                )
            )
            if best.step is None or (step is not None and step.step_time_s < best.step.step_time_s):
                best = found
            if step is not None:
                forks = step.layer_of is not None
                one = search.num_microbatches, step, self.searches
                if step.step_time_s < self.best.setdefault(forks, one)[1].step_time_s:
                    self.best[forks] = one
        return best

    def _outcomes(self, search: StageSearch) -> Iterator[tuple[str, Outcome]]:
        """The results with parallel branches, if there are any, then those of each schedule. If nothing fits, the last
        one has the reason."""
        if self.branches is not None:
            shapes = tuple(dict.fromkeys(replace(shape, option=0) for shape in search.shapes))
            yield from self.branches.outcomes(search.num_microbatches, shapes, search.budget_bytes)
        for name in self._schedules():
            yield name, search.outcome((name,), self.request.partitioner)

    def _branches(self) -> BranchSearch | None:
        """The search for stages that fork and join, if the step does and the request leaves everything open."""
        request = self.request
        free = request.stages == request.schedule == "auto" and request.partitioner is None
        if not free or request.cluster.num_devices == 1:
            return None
        layers = forked_layers(self.cuttable.flow, self.cuttable.chain)
        if layers is None:
            return None
        return BranchSearch(self.cuttable, layers, request.cluster, request.profiles, _SEARCH_LIMIT_S, request.planning)

    def _schedules(self) -> Sequence[str]:
        if self.request.schedule == "auto":
            return SCHEDULES if self.cuttable.flow.backward else ("inference",)
        return (find(self.request.schedule).name,)

    # -- the plan ----------------------------------------------------------------------------

    def _plan(self, count: int, step: StagedStep) -> tuple[PipelinePlan, float]:
        """The plan of these stages, and their largest ratio of memory to budget."""
        request, schedule = self.request, step.schedule
        programs, runs, planned = self._stages(count, step)
        stages = [
            StagePlan(
                first_layer=stage.first,
                last_layer=stage.last,
                submesh=stage.submesh,
                cost=cost,
                plan=replace(run.plan, memory_budget_bytes=None),  # the budget depends on the schedule
            )
            for stage, cost, run in zip(step.stages, planned.costs, runs, strict=True)
        ]
        starts, run_layers = self.searches.clustering.starts, ()
        if step.layer_of is not None:
            layers = step.layer_of
            starts = tuple(n for n in range(len(layers)) if n == 0 or layers[n] != layers[n - 1])
            run_layers = tuple(layers[start] for start in starts)
        timeline = planned.timeline
        graph = self.program.graph
        inputs = _placed(graph, programs, runs, "argument")
        outputs = _placed(graph, programs, runs, "result")
        plan = PipelinePlan(
            program=self.program.signature,
            cluster=request.cluster,
            memory_budget_bytes=request.memory_budget_bytes,
            strategy=_description(stages, schedule.name, count, forks=bool(run_layers)),
            schedule=schedule.name,
            num_microbatches=count,
            starts=starts,
            run_layers=run_layers,
            virtual=1 if run_layers else len(stages) // schedule.num_submeshes,
            stages=tuple(stages),
            sends=planned.sends,
            inputs=tuple(tensor for tensor, _ in inputs),
            outputs=tuple(tensor for tensor, _ in outputs),
            input_parts=tuple(parts for _, parts in inputs),
            output_parts=tuple(parts for _, parts in outputs),
            carried=graph.carried,
            donated=self.program.donated,
            prediction=PipelinePrediction(
                step_time_s=timeline.makespan_s,
                bubble_fraction=timeline.bubble_fraction,
                stage_bytes=planned.peak_bytes,
            ),
            efficiency=efficiency_of(
                self.program.as_traced.graph,
                [tensor for tensor, _ in inputs],
                [(group.num_devices, request.profiles[group.kind]) for group in request.cluster.groups],
                _bounds(stages, timeline),
            ),
            outcome=SearchOutcome(
                status=step.partition.status.value,
                gap=_gap(step.partition.cost_s, step.partition.lower_bound_s),
                num_layers=step.stages[-1].last + 1,
                num_planned=self.searches.num_planned + (self.branches.num_planned if self.branches else 0),
                among=step.partition.among,
                search_time_s=time.perf_counter() - self.started,
            ),
            own_statistics=request.own_statistics,
            tried=tuple(self.tried),
            versions=versions_of(),
            in_tree=self.program.trace.in_tree,
            out_tree=self.program.trace.out_tree,
        )
        return plan, planned.over(request.budgets)

    def _stages(
        self, count: int, step: StagedStep
    ) -> tuple[tuple[StageProgram, ...], Sequence[PlannedRun], StagedStep]:
        """The programs of stages, their plans, and the step with the costs of these plans."""
        if step.layer_of is not None:
            assert self.branches is not None, "who else finds such stages?"
            return self.branches.planned(count, step)
        programs, runs = self.searches.planned(count, step.stages)
        costs, sent = [run.cost for run in runs], exchanges_of(programs)
        return programs, runs, self.searches.search(count).with_costs(step, costs, sent)


def _gap(cost: float, bound: float) -> float:
    return max(0.0, (cost - bound) / cost) if cost else 0.0


def _placed(
    graph: Graph, programs: Sequence[StageProgram], runs: Sequence[PlannedRun], kind: Literal["argument", "result"]
) -> list[tuple[TensorPlan, tuple[LeafPart, ...]]]:
    """The shardings and stages of the step's arguments or results. Carried state is on the stage that updates it; other
    leaves on the first stage that uses or produces them; unused ones on the first stage, replicated."""
    given = kind == "argument"
    values, paths = (graph.inputs, graph.input_paths) if given else (graph.outputs, graph.output_paths)
    found: dict[int, dict[Rows | None, tuple[TensorPlan, int]]] = defaultdict(dict)
    for s, (program, run) in enumerate(zip(programs, runs, strict=True)):
        ports, tensors = (program.inputs, run.plan.inputs) if given else (program.outputs, run.plan.outputs)
        renewed = {position for position, _ in program.program.graph.carried} if given else set[int]()
        for position, (port, tensor) in enumerate(zip(ports, tensors, strict=True)):
            if port.kind == kind and (port.rows not in found[port.value] or position in renewed):
                found[port.value][port.rows] = tensor, s
    placed = []
    for position, value in enumerate(values):
        whole = _whole(graph, paths[position], value)
        parts = sorted(found[position].items(), key=lambda item: item[0].start if item[0] else 0)
        if parts:
            largest = max(tensor.num_bytes for _, (tensor, _) in parts)
            whole = replace(parts[0][1][0], path=whole.path, shape=whole.shape, num_bytes=largest)
        placed.append((whole, tuple(_part(s, t, rows) for rows, (t, s) in parts) or (_part(0, whole, None),)))
    return placed


def _part(stage: int, tensor: TensorPlan, rows: Rows | None) -> LeafPart:
    place = None if rows is None else (rows.dim, rows.start, rows.stop)
    return LeafPart(stage=stage, sharding=tensor.sharding, rows=place)


def _whole(graph: Graph, path: str, value: int | None) -> TensorPlan:
    """The plan of a leaf that no stage uses or produces."""
    info = None if value is None else graph.values[value]
    shape = info.shape if info else ()
    return TensorPlan(
        path=path,
        shape=shape,
        dtype=info.dtype if info else "literal",
        role="data",
        sharding=TensorSharding(((),) * len(shape)),
        num_bytes=info.num_bytes if info else 0.0,
    )


def _description(stages: Sequence[StagePlan], schedule: str, num_microbatches: int, *, forks: bool) -> str:
    """A description of the plan in one line."""
    inside = list(dict.fromkeys(stage.plan.strategy for stage in stages))
    submeshes = list(dict.fromkeys(stage.devices for stage in stages))
    sizes = " + ".join(str(len(devices)) for devices in submeshes)
    virtual = f", {len(stages) // len(submeshes)} on each submesh" if not forks and len(submeshes) < len(stages) else ""
    count = f"{len(stages)} stages on {sizes} devices{virtual}" if len(stages) > 1 else f"one stage on {sizes} devices"
    count += ", branches side by side" if forks else ""
    batches = f"{num_microbatches} microbatches" if num_microbatches > 1 else "1 microbatch"
    within = f"; inside: {inside[0]}" if len(inside) == 1 else f"; inside: {' | '.join(inside)}"
    return f"{count}, {schedule}, {batches}{within}"
