"""Plan a traced step as pipeline stages.

    Program -> Cuttable -> layers -> costs of their runs -> stages, schedule, microbatches -> a Plan for each stage

In: a `Program` and a request.
Out: a `PipelinePlan`. Nothing is compiled and no device is used.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import BudgetError, ClusterError
from autopar.ir.graph import Graph
from autopar.pipeline.cut.branches import ForkedLayers, forked_layers
from autopar.pipeline.cut.exchanges import exchanges_of
from autopar.pipeline.cut.split_loops import with_split_loops
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, SubmeshShape
from autopar.pipeline.partition.cluster_layers import Clustering, cheapest_cuts, repeated_layers
from autopar.pipeline.plan import PipelinePlan, StagesTried
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.table import find, searched, shapes_with
from autopar.pipeline.schedule.token_slices import TERAPIPE, terapipe
from autopar.pipeline.search.branch_search import BranchSearch
from autopar.pipeline.search.check_schedule import check_schedule, check_stages
from autopar.pipeline.search.microbatch_search import Tried, checked_count, divisors, over_microbatches
from autopar.pipeline.search.record_stages import recorded, runs_of_layers
from autopar.pipeline.search.request import SlowStagesError, StageRequest
from autopar.pipeline.search.searches_by_microbatches import Searches, Units
from autopar.pipeline.search.sent_values import with_sent_values
from autopar.pipeline.search.stage_costs import STATE_PRICES, PlannedRun, StageCosts, likely_shapes
from autopar.pipeline.search.stage_layouts import StageLayouts, stage_layouts
from autopar.pipeline.search.stage_search import Outcome, StagedStep, StageSearch, fastest
from autopar.pipeline.search.token_slice_search import with_token_slices
from autopar.planner.memory_budget import MARGIN
from autopar.system.gc_pause import seldom_collect
from autopar.system.units import human_bytes
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program

#: The first number of microbatches to try has about so many per device, and at least so many examples per microbatch:
#: with fewer microbatches stages wait, with fewer examples kernels are small.
_FIRST_PER_DEVICE, _FIRST_EXAMPLES = 8, 4
#: The most layers of a step: enough for 48 equal blocks, one layer each, and layers before and after them.
_MOST_LAYERS = 64
#: Units that repeat have prices of their own if the plans of all of them have at most so many equations together.
_MOST_PLANNED = 16_000
#: The most layers of a step whose units have prices of their own, and the parts that are each rematerialized together.
_MOST_TIMED, _REMATERIALIZED_PARTS = 96, 16
#: What the proof says of stages whose borders are moved.
_MOVED = ", borders then moved by single equations"
#: How far borders of stages are moved, one after the other, as shares of the time of all units.
_WINDOWS = (0.06, 0.015, 0.004)
#: A chain and stages that fork are both planned if their step times are within this factor.
_CLOSE = 1.1
#: Number of microbatches, stages, and searches with their layers.
_Found = tuple[int, StagedStep, Searches]
#: How often the search is repeated when the planned stages exceed their estimated memory.
_MOST_REPLANS = 2
#: The time limit of one schedule's partition.
_SEARCH_LIMIT_S = 60.0


@seldom_collect()
def plan_stages(program: Program, request: StageRequest) -> PipelinePlan:
    """Partition a step into stages and plan each.

    Raises:
        MicrobatchError: the batch cannot be split into the requested microbatches.
        BudgetError: nothing fits.
        ClusterError, ScheduleError: the request is impossible.
        SlowStagesError: no stages are faster than the request's limit.
    """
    if request.schedule != "auto" and find(request.schedule) is TERAPIPE:
        request = with_token_slices(program, request)
    plans: list[PipelinePlan] = []
    failures: list[BudgetError] = []
    slow: list[StagesTried] | None = None
    for splits_loops in _passes(program, request):
        try:
            plans.append(_Planning(program, request, splits_loops).run())
        except BudgetError as error:
            failures.append(error)
        except SlowStagesError as error:
            slow = [*(slow or ()), *error.tried]
    if not plans and slow is not None:
        raise SlowStagesError(slow)
    if not plans:
        raise failures[0]
    tried = tuple(one for plan in plans for one in plan.tried)
    return replace(min(plans, key=lambda plan: plan.prediction.step_time_s), tried=tried)


def _passes(program: Program, request: StageRequest) -> Sequence[bool | None]:
    """Whether to plan the step with its loops split, without, or both; None if it has no loops to split. Schedules with a
    split backward pass gain by it, and the others lose."""
    kinds = searched(trains=True) if request.schedule == "auto" else (find(request.schedule),)
    ways = sorted({kind.backward == "split" for kind in kinds})
    trace = program.as_written.trace
    if request.stages == 1 or True not in ways or with_split_loops(trace) is trace:
        return (None,)
    return ways


def searches_of(cuttable: Cuttable, request: StageRequest, layouts: StageLayouts | None = None) -> Searches:
    """The searches of a step that `plan_stages` uses.

    Args:
        layouts: the meshes and shardings of stages that the user fixes.
    """
    layouts = layouts or StageLayouts()
    clustering, units = _layers(cuttable, request, layouts)
    return Searches(
        cuttable,
        clustering,
        units,
        request.cluster,
        request.profiles,
        request.budgets,
        _SEARCH_LIMIT_S,
        num_stages=None if request.stages == "auto" else request.stages,
        limit_s=request.limit_s,
        layouts=layouts,
        planning=request.planning,
    )


def _branch_search(
    cuttable: Cuttable, forked: ForkedLayers, request: StageRequest, layouts: StageLayouts
) -> BranchSearch:
    """The search for branches side by side."""
    return BranchSearch(
        cuttable,
        forked,
        request.cluster,
        request.profiles,
        _SEARCH_LIMIT_S,
        None if request.stages == "auto" else request.stages,
        layouts,
        request.planning,
        request.limit_s,
    )


def _layers(cuttable: Cuttable, request: StageRequest, layouts: StageLayouts) -> tuple[Clustering, Units | None]:
    """The layers of a step, and its units if each has a price of its own.

    That is more exact, and borders of stages may be anywhere, but a plan of all units for each shape of submesh takes longer
    than plans of repeated layers.
    """
    chain = cuttable.chain
    cuts, num_units = [0.0, *chain.cut_bytes], len(chain.units)
    repeated = repeated_layers(chain.flops, cuts, most_layers=_MOST_LAYERS)
    sizes = [unit.stop - unit.start for unit in (cuttable.flow.units[i] for i in chain.units)]
    if repeated is not None and repeated.repeats(sizes):
        num_plans = len(STATE_PRICES) * len(likely_shapes(request.cluster))
        if cuttable.stacks or num_plans * sum(sizes) > _MOST_PLANNED:
            return repeated, None
    _, count = _numbers(cuttable, request)
    layers, together = cuttable.layers(range(num_units), count), (0,) * num_units
    prices = StageCosts(layers, request.profiles, range(num_units), together=together, layouts=layouts)
    seconds = prices.layers_s(SubmeshShape(request.cluster.kinds[0], 1, 1))
    least = 1 if request.stages == "auto" else min(request.stages, num_units)
    parts = cheapest_cuts(seconds, cuts, _REMATERIALIZED_PARTS).layers(num_units)
    together = tuple(part for part, layers in enumerate(parts) for _ in layers)
    return cheapest_cuts(seconds, cuts, _MOST_TIMED, least), Units(tuple(seconds), together)


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
    return (checked_count(count),), count


def frozen_arguments(graph: Graph) -> tuple[int, ...]:
    """The positions of arguments that hold parameters, in a step that updates no state, such as an evaluation: pytrees
    of floating-point arrays whose leading dims differ, as the examples of a batch have not. Nothing if no other argument
    is left to be the batch."""
    if graph.carried:
        return ()
    arguments: dict[str, list[int]] = defaultdict(list)
    for position, path in enumerate(graph.input_paths):
        arguments[path.split("/")[0]].append(position)
    found: list[int] = []
    for positions in arguments.values():
        infos = [graph.values[graph.inputs[position]] for position in positions]
        arrays = [info for info in infos if info.shape]
        are_floats = all("float" in info.dtype for info in arrays)  # a batch often has token ids or labels
        found += positions if are_floats and len({info.shape[0] for info in arrays}) > 1 else []
    rest = [graph.values[value].shape for n, value in enumerate(graph.inputs) if n not in set(found)]
    return tuple(found) if any(shape and shape[0] > 1 for shape in rest) else ()


def _are_slow(tried: Sequence[Tried], limit_s: float) -> bool:
    """Whether stages may fit, and the best are above the limit by more than moved cuts save."""
    may_fit = any(one.outcome.step or one.outcome.is_slow for one in tried)
    return may_fit and tried[0].step_time_s > _CLOSE * limit_s


class _Planning:
    """Plans one step.

    Args:
        splits_loops: whether to split loops, and to search schedules with a split backward pass only; None for a step
            without loops to split, and all schedules.
    """

    def __init__(self, program: Program, request: StageRequest, splits_loops: bool | None = None) -> None:
        self.request, self.splits_loops, self.started = request, splits_loops, time.perf_counter()
        self.program = program.as_written
        self.report = request.progress or (lambda stage, fraction: None)
        self.report("layers", 0.0)
        self.read_state = frozen_arguments(self.program.graph)
        self.cuttable = _cuttable(program, request, self.read_state, bool(splits_loops))
        forked = None if splits_loops else self._forked_layers()
        self._check_request(forks=forked is not None)
        self.layouts = self._layouts(forks=forked is not None)
        self.searches = searches_of(self.cuttable, request, self.layouts)
        self.num_layers = len(self.searches.clustering.starts)
        self.branches = forked and _branch_search(self.cuttable, forked, request, self.layouts)
        self.tried: list[StagesTried] = []
        #: By whether stages fork, the best: the number of microbatches, the step, and the searches whose layers it has.
        self.best: dict[bool, _Found] = {}
        self.best_under: dict[str, _Found] = {}  # by schedule

    def run(self) -> PipelinePlan:
        numbers, start = _numbers(self.cuttable, self.request)
        tried = over_microbatches(self._search, numbers, start, self._found, self._estimate)
        best = tried[0]
        if _are_slow(tried, self.request.limit_s):
            raise SlowStagesError(self.tried)
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
        plans, failures = list[PipelinePlan](), list[BudgetError]()
        close = [one for one in self.best.values() if one[1].step_time_s <= _CLOSE * best.step_time_s]
        for count, step, self.searches in close:
            try:
                plans.append(self._within(count, step))
            except BudgetError as error:
                failures.append(error)
        if not plans:
            raise failures[0]
        plans += self._cheaper(min(plan.prediction.step_time_s for plan in plans))
        self.report("done", 1.0)
        return replace(min(plans, key=lambda plan: plan.prediction.step_time_s), tried=tuple(self.tried))

    def _cheaper(self, planned_s: float) -> Iterator[PipelinePlan]:
        """Plans of the best stages under other schedules, where these are priced below the planned stages."""
        done = set(map(_order, (step for _, step, _ in self.best.values())))
        for count, step, searches in sorted(self.best_under.values(), key=lambda found: found[1].step_time_s):
            if _order(step) in done or step.step_time_s >= planned_s:
                continue
            done.add(_order(step))
            self.searches = searches
            with contextlib.suppress(BudgetError):
                plan = self._within(count, step)
                planned_s = min(planned_s, plan.prediction.step_time_s)
                yield plan

    def _move_cuts(self) -> None:
        """Move the borders of the best stages by single units, where that makes the step faster."""
        if self.request.partitioner is not None or False not in self.best:
            return
        proven = self.best[False][1].partition  # the search among all layers
        proven = replace(proven, among=proven.among and proven.among + _MOVED)
        for window in _WINDOWS:
            count, step, searches = self.best[False]
            finer = searches.near(step.stages, window) if len(step.stages) > 1 else None
            if finer is None:
                return
            self.report("borders of stages", 0.88)
            shapes = tuple(dict.fromkeys(stage.submesh.shape for stage in step.stages))
            assert step.kind is not None, "these stages are a chain"
            found = finer.search(count, shapes).outcome((step.kind,)).step
            if found is not None and found.step_time_s < step.step_time_s:
                self.best[False] = count, replace(found, partition=proven), finer

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

    def _check_request(self, *, forks: bool) -> None:
        """Refuse more stages than devices, and a forward-only schedule for a step with a backward pass.

        Args:
            forks: whether branches are searched, of which a submesh runs several stages.
        """
        check_schedule(self.cuttable, self.program.signature.name, self.request)
        num_devices, stages = self.request.cluster.num_devices, self.request.stages
        if stages != "auto" and stages > num_devices and not forks and not self._fewest_submeshes():
            raise ClusterError(
                f"{stages} stages were requested, and {num_devices} device{'s' * (num_devices > 1)} can have at most"
                f" {num_devices}: choose 1 to {num_devices}, or with several stages on each submesh, schedule='interleaved'"
                " and a multiple of the number of submeshes"
            )

    def _fewest_submeshes(self) -> int:
        """The least number of submeshes, from 2, on which a schedule can have the requested number of stages; 0 if none."""
        stages, num_devices = self.request.stages, self.request.cluster.num_devices
        assert stages != "auto", "any number of stages is allowed"
        count = self.request.num_microbatches
        known = count if isinstance(count, int) else 2 * num_devices  # enough for any schedule
        shapes = [one for kind in self._schedules() for one in shapes_with(kind, stages, num_devices, known)]
        return min((one.num_submeshes for one in shapes), default=0)

    # -- the search --------------------------------------------------------------------------

    def _search(self, count: int, among: Sequence[SubmeshShape] | None) -> StageSearch:
        self.report(f"stages for {count} microbatches", min(0.85, 0.05 + 0.1 * len(self.searches.costs)))
        return self.searches.search(count, among)

    def _estimate(self, count: int, known: int, among: Sequence[SubmeshShape]) -> StageSearch | None:
        """An estimating search for the default partitioner, where the best stages so far are a chain; otherwise None, so that a
        full search runs."""
        chain, forks = (self.best.get(kind) for kind in (False, True))
        leads = chain is not None and (forks is None or chain[1].step_time_s <= forks[1].step_time_s)
        if self.request.partitioner is not None or not (self.branches is None or leads):
            return None
        return self.searches.estimate(count, known, among)

    def _found(self, search: StageSearch) -> Outcome:
        """The best result of all schedules. The result of each schedule is recorded in `tried`."""
        outcomes: list[Outcome] = []
        for name, found in self._outcomes(search):
            step = found.step
            self.tried.append(_tried(search.num_microbatches, name, step, reason=found.reason))
            outcomes.append(found)
            if step is not None:
                forks = step.layer_of is not None
                one = search.num_microbatches, step, self.searches
                known = self.best_under.setdefault(name, one)
                self.best_under[name] = min(known, one, key=lambda found: found[1].step_time_s)
                if step.step_time_s < self.best.setdefault(forks, one)[1].step_time_s:
                    self.best[forks] = one
        return fastest(outcomes)

    def _outcomes(self, search: StageSearch) -> Iterator[tuple[str, Outcome]]:
        """The results with parallel branches, if there are any, then those of each schedule. If nothing fits, the last
        one has the reason."""
        if self.branches is not None:
            shapes = tuple(dict.fromkeys(replace(shape, option=0) for shape in search.shapes))
            yield from self.branches.outcomes(search.num_microbatches, shapes, search.budget_bytes)
        usual = self.request.schedule == self.request.stages == "auto"
        for kind in self._schedules() if self._chain_may_be() else ():
            yield kind.name, search.outcome((kind,), self.request.partitioner, usual=usual)

    def _chain_may_be(self) -> bool:
        """Whether a chain may have the requested number of stages. If not, stages that fork may have it."""
        stages, most = self.request.stages, len(self.searches.clustering.starts)
        if self.branches is None or stages == "auto" or stages == 1:
            return True
        return stages <= most and (stages <= self.request.cluster.num_devices or self._fewest_submeshes() > 0)

    def _forked_layers(self) -> ForkedLayers | None:
        """The layers of stages that fork and join, if the step does and the request leaves the schedule open."""
        request = self.request
        is_open = request.schedule == "auto" and request.partitioner is None and request.stages != 1
        if not is_open or request.cluster.num_devices == 1:
            return None
        return forked_layers(self.cuttable.flow, self.cuttable.chain)

    def _layouts(self, *, forks: bool) -> StageLayouts:
        """The meshes and shardings of stages that the request fixes."""
        request, cluster = self.request, self.request.cluster
        least = 1
        if request.stages not in ("auto", 1):  # branches are on parts of one submesh
            least = 2 if forks else self._fewest_submeshes() or request.stages
        sizes = {shape.num_devices for shape in request.shapes}
        return stage_layouts(self.program.graph, request.pins, request.mesh, sizes, cluster.num_devices, least)

    def _schedules(self) -> Sequence[ScheduleKind]:
        if self.request.schedule != "auto":
            return (find(self.request.schedule),)
        kinds = searched(trains=bool(self.cuttable.flow.backward))
        return [one for one in kinds if self.splits_loops in (None, one.backward == "split")]

    # -- the plan ----------------------------------------------------------------------------

    def _plan(self, count: int, step: StagedStep) -> tuple[PipelinePlan, float]:
        """The plan of these stages, and their largest ratio of memory to budget."""
        if step.layer_of is None:
            searches, step = self.searches.in_parts(step)
            starts, run_layers, num_layers = searches.clustering.starts, (), self.num_layers
            programs, runs = searches.planned(count, step.stages)
            splits, step = step.schedule.splits_backward, _with_shares(step, runs)
            runs = with_sent_values(runs, step.stages, self.request.profiles, count, splits_backward=splits)
            check_stages(step.kind, programs)
            costs = [run.cost for run in runs]
            planned = searches.search(count).with_costs(step, costs, exchanges_of(programs))
        else:
            assert self.branches is not None, "who else finds such stages?"
            (starts, run_layers), num_layers = runs_of_layers(step.layer_of), step.stages[-1].last + 1
            programs, runs, planned = self.branches.planned(count, step)
        plan = recorded(
            self.program,
            planned,
            programs,
            [run.plan for run in runs],
            cluster=self.request.cluster,
            profiles=self.request.profiles,
            memory_budget_bytes=self.request.memory_budget_bytes,
            num_microbatches=count,
            starts=starts,
            run_layers=run_layers,
            num_layers=num_layers,
            num_planned=self.searches.num_planned + (self.branches.num_planned if self.branches else 0),
            own_statistics=self.request.own_statistics,
            splits_loops=bool(self.splits_loops),
            read_state=self.read_state,
            tried=(),
            search_time_s=time.perf_counter() - self.started,
        )
        self.tried.append(_tried(count, plan.schedule, planned, planned=True))
        return plan, planned.over(self.request.budgets)


def _order(step: StagedStep) -> str:
    """The name of the schedule; "" for one stage, which runs alike under all."""
    return step.schedule.name if len(step.stages) > 1 else ""


def _tried(
    count: int, schedule: str, step: StagedStep | None, *, planned: bool = False, reason: str = ""
) -> StagesTried:
    """The record of stages that were priced or planned, or that nothing fits."""
    return StagesTried(
        schedule=schedule,
        num_stages=len(step.stages) if step else 0,
        num_microbatches=count,
        step_time_s=step.step_time_s if step else math.inf,
        peak_bytes=max(step.peak_bytes) if step else math.inf,
        planned=planned,
        reason="" if step else reason,
    )


def _cuttable(program: Program, request: StageRequest, read_state: Sequence[int], splits_loops: bool) -> Cuttable:
    """The step as the schedule cuts it."""
    token_slices = () if request.schedule == "auto" else find(request.schedule).token_slices
    options = {"own_statistics": request.own_statistics, "read_state": read_state}
    return Cuttable.of(program, splits_loops=splits_loops, token_slices=token_slices, **options)


def _with_shares(step: StagedStep, runs: Sequence[PlannedRun]) -> StagedStep:
    """The step, if it runs in slices of tokens with the shares of each in the seconds of all stages. Together they may be
    more than 1, because a slice is a program of its own."""
    if step.kind is None or not step.kind.token_slices:
        return step
    seconds = np.sum([run.slices for run in runs], axis=0)
    whole = np.sum([(run.cost.forward_s, run.cost.backward_s + run.cost.weight_s) for run in runs], axis=0)
    shares = seconds / np.maximum(whole, np.finfo(float).tiny)
    of_slices = tuple((float(forward), float(backward)) for forward, backward in shares)
    return replace(step, kind=terapipe(step.kind.token_slices, of_slices))
