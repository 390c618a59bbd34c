"""The stage partition equals exhaustive search on clusters, memory limits and schedules of all kinds."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import CLUSTERS, OBJECTIVES, Tables, objective_named

from autopar.errors import ClusterError
from autopar.pipeline.partition.branches import Branches
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, Submesh, SubmeshShape, lines
from autopar.pipeline.partition.cluster_layers import (
    Clustering,
    cheapest_cuts,
    cluster_layers,
    cuts_near,
    repeated_layers,
)
from autopar.pipeline.partition.equal_submeshes import EqualSubmeshPartitioner
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.price_tables import Prices
from autopar.pipeline.partition.problem import (
    CostTables,
    Growth,
    Partition,
    PartitionProblem,
    Stage,
    StageCost,
)
from autopar.pipeline.schedule.kind import PipelineShape, Placement, ScheduleKind, in_turn
from autopar.pipeline.schedule.table import find
from autopar.solve.problem import Status
from benchmarks.baselines.stages_equal import EqualLayers, EqualOperators
from benchmarks.baselines.stages_min_cut import MinCut
from benchmarks.baselines.stages_random import RandomSearch
from benchmarks.baselines.stages_reinforce import Reinforce
from benchmarks.pipeline.partition import check_sound, d_host, evaluate, every_partition


@st.composite
def problems(draw: st.DrawFn, growth: Growth | None = None) -> PartitionProblem:
    num_layers = draw(st.integers(1, 5))
    known: Growth = growth or draw(st.sampled_from(list(Growth)))
    tables = Tables(draw(st.integers(0, 10_000)), num_layers, known, draw(st.sampled_from([0.0, 0.3])))
    return PartitionProblem(
        num_layers=num_layers,
        cluster=draw(st.sampled_from(CLUSTERS)),
        cost=tables.cost,
        transfer_s=tables.transfer_s,
        objective=draw(st.sampled_from(OBJECTIVES))(draw(st.integers(1, 9))),
        budget_bytes={"a": float(draw(st.integers(5, 60))), "b": float(draw(st.sampled_from([10, 40, 1000])))},
        growth=known,
        max_stages=draw(st.sampled_from([None, None, 2])),
    )


# -- looking at everything ---------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(problems())
def test_equals_looking_at_every_partition(problem: PartitionProblem) -> None:
    found = ExactPartitioner().partition(problem)
    least = min((evaluate(problem, stages) for stages in every_partition(problem)), default=math.inf)
    if math.isinf(least):
        assert found.status is Status.INFEASIBLE
        assert not found.stages
        assert found.reason
        return
    assert found.status is Status.OPTIMAL
    check_sound(problem, found.stages)
    assert evaluate(problem, found.stages) == pytest.approx(found.cost_s, rel=1e-9)
    assert found.cost_s == pytest.approx(least, rel=1e-9)
    assert found.lower_bound_s <= least * (1 + 1e-9)
    for other in found.others:
        check_sound(problem, other)
        assert evaluate(problem, other) >= least * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_the_shortage_is_the_least_that_any_partition_has(problem: PartitionProblem) -> None:
    problem = replace(problem, budget_bytes={"a": 1.0, "b": 2.0}, max_stages=None)
    found = ExactPartitioner().partition(problem)
    if found.stages:
        return

    def lacking(stages: tuple[Stage, ...]) -> float:
        worst = 0.0
        for number, stage in enumerate(stages):
            cost = problem.cost(stage.first, stage.last, stage.submesh.shape)
            if cost is None:
                return math.inf
            in_flight = problem.objective.in_flight(len(stages) - 1 - number, len(stages))
            worst = max(worst, cost.bytes_with(in_flight) - problem.budget_bytes[stage.submesh.shape.kind])
        return worst

    least = min(map(lacking, every_partition(problem)))
    if math.isinf(least):
        assert found.shortage is None
        assert "can run" in found.reason
        return
    shortage = found.shortage
    assert shortage is not None
    assert shortage.missing_bytes == pytest.approx(least)
    cost = problem.cost(shortage.stage.first, shortage.stage.last, shortage.stage.submesh.shape)
    assert cost is not None
    assert shortage.needed_bytes == pytest.approx(cost.bytes_with(shortage.in_flight))
    assert str(shortage.stage) in found.reason


# -- what is asked -----------------------------------------------------------------------------


def transformer(num_layers: int = 12, num_microbatches: int = 8) -> PartitionProblem:
    """Equal layers between an embedding and a head, on two hosts of four."""

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        count = sum(0.5 if i == 0 else 1.5 if i == num_layers - 1 else 1.0 for i in range(first, last + 1))
        seconds = count / shape.num_devices + 0.05 * count * (shape.num_devices > 1) + 0.3 * (shape.num_hosts > 1)
        return StageCost(
            forward_s=seconds,
            backward_s=2 * seconds,
            state_bytes=8 * count / shape.num_devices,
            flight_bytes=count / shape.num_devices,
        )

    return PartitionProblem(
        num_layers=num_layers,
        cluster=Cluster((DeviceGroup("a", 2, 4),)),
        cost=cost,
        transfer_s=lambda boundary, source, target, same_host: 0.01 if same_host else 0.1,
        objective=objective_named("1f1b", num_microbatches),
        budget_bytes={"a": 60.0},
        growth=Growth.SUPERADDITIVE,
        layer_keys=["embedding", *["block"] * (num_layers - 2), "head"],
    )


def test_superadditive_costs_need_few_queries() -> None:
    problem = transformer()
    everything = ExactPartitioner().partition(replace(problem, growth=Growth.UNKNOWN, layer_keys=None))
    few = ExactPartitioner().partition(problem)
    assert few.cost_s == pytest.approx(everything.cost_s, rel=1e-9)
    assert everything.num_queries == 12 * 13 // 2 * len(problem.all_shapes)
    assert few.num_queries < everything.num_queries / 4


def test_costs_of_equal_runs_are_queried_once() -> None:
    asked: list[tuple[object, ...]] = []
    problem = transformer()
    keys = problem.layer_keys
    assert keys is not None

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        asked.append((*keys[first : last + 1], shape))
        return problem.cost(first, last, shape)

    found = ExactPartitioner().partition(replace(problem, cost=cost))
    assert len(asked) == len(set(asked)) == found.num_queries


def test_an_optimistic_bound_saves_prices_and_changes_nothing() -> None:
    problem = replace(transformer(), growth=Growth.UNKNOWN)

    def bound(first: int, last: int, shape: SubmeshShape) -> StageCost:
        cost = problem.cost(first, last, shape)
        assert cost is not None
        return replace(cost, forward_s=0.9 * cost.forward_s, backward_s=0.9 * cost.backward_s, flight_bytes=0.0)

    plain, bounded = (ExactPartitioner().partition(p) for p in (problem, replace(problem, bound=bound)))
    assert bounded.cost_s == pytest.approx(plain.cost_s, rel=1e-9)
    assert bounded.num_queries < plain.num_queries / 2


@pytest.mark.parametrize("fixed", [0.01, 1.0])
def test_where_runs_do_not_add_up_it_is_noticed(fixed: float) -> None:
    """Each run costs something besides its layers, so a long one is cheaper than its parts together."""
    problem = transformer()

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        plain = problem.cost(first, last, shape)
        assert plain is not None
        return replace(plain, forward_s=plain.forward_s + fixed)

    right = ExactPartitioner().partition(replace(problem, cost=cost, growth=Growth.UNKNOWN))
    found = ExactPartitioner().partition(replace(problem, cost=cost))
    assert found.slack_s > 0
    assert found.status is Status.OPTIMAL
    assert found.cost_s == pytest.approx(right.cost_s, rel=1e-9)
    assert found.lower_bound_s <= found.cost_s


# -- what comes out ----------------------------------------------------------------------------


def test_a_model_that_fits_and_fast_links_leave_one_stage() -> None:
    """Where all devices together are as quick as they are many, a pipeline only has a bubble."""

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        return StageCost(forward_s=(last - first + 1) / shape.num_devices)

    problem = replace(transformer(), cost=cost)
    found = ExactPartitioner().partition(problem)
    assert [(s.first, s.last, s.submesh.shape.num_devices) for s in found.stages] == [(0, 11, 8)]


def test_submeshes_need_not_be_powers_of_two_nor_stages_equal() -> None:
    """Two layers of work 3 and 1 on four devices: three for the first and one for the other."""

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        work = sum((3.0, 1.0)[first : last + 1])
        return StageCost(forward_s=work / shape.num_devices + (10.0 if shape.num_devices == 4 else 0.0))

    problem = PartitionProblem(
        num_layers=2,
        cluster=Cluster((DeviceGroup("a", 1, 4),)),
        cost=cost,
        transfer_s=lambda *_: 0.0,
        objective=objective_named("inference", 50),
        budget_bytes={"a": 1.0},
    )
    found = ExactPartitioner().partition(problem)
    assert [s.submesh.shape.num_devices for s in found.stages] == [3, 1]


@pytest.mark.parametrize("first", ["big", "small"])
def test_either_kind_may_come_first(first: str) -> None:
    """Only one kind has room for the first layer, whichever group was named first."""

    def cost(begin: int, last: int, shape: SubmeshShape) -> StageCost:
        return StageCost(forward_s=1.0 + last - begin, state_bytes=90.0 if begin == 0 else 10.0)

    groups = (DeviceGroup("big", 1, 1), DeviceGroup("small", 1, 1))
    problem = PartitionProblem(
        num_layers=2,
        cluster=Cluster(groups if first == "big" else groups[::-1]),
        cost=cost,
        transfer_s=lambda *_: 0.0,
        objective=objective_named("inference", 10),
        budget_bytes={"big": 100.0, "small": 20.0},
    )
    found = ExactPartitioner().partition(problem)
    assert [s.submesh.shape.kind for s in found.stages] == ["big", "small"]
    assert [s.submesh.first_device for s in found.stages] == ([0, 1] if first == "big" else [1, 0])


def test_devices_stay_idle_only_where_that_helps() -> None:
    def problem(slow: float) -> PartitionProblem:
        return replace(
            transformer(),
            cost=lambda first, last, shape: StageCost(forward_s=1.0 + slow * (shape.num_devices > 1)),
            max_stages=1,
        )

    alike, dear = (ExactPartitioner().partition(problem(slow)) for slow in (0.0, 1.0))
    assert alike.stages[0].submesh.shape.num_devices == 8
    assert dear.stages[0].submesh.shape.num_devices == 1


def test_gpipe_holds_more_than_1f1b_and_so_fits_less() -> None:
    problem = replace(transformer(num_microbatches=16), budget_bytes={"a": 14.0})
    found = ExactPartitioner().partition(problem)
    assert found.status is Status.OPTIMAL
    all_in_flight = ExactPartitioner().partition(replace(problem, objective=objective_named("gpipe", 16)))
    assert all_in_flight.status is Status.INFEASIBLE
    assert all_in_flight.shortage is not None
    assert all_in_flight.shortage.in_flight == 16
    assert "more than the budget of 14 B" in all_in_flight.reason


def test_what_no_submesh_can_run_is_named() -> None:
    problem = replace(
        transformer(),
        cost=lambda first, last, shape: None if first <= 5 <= last else StageCost(forward_s=1.0),
        layer_keys=None,
    )
    found = ExactPartitioner().partition(problem)
    assert found.status is Status.INFEASIBLE
    assert found.reason == "no submesh of 2x4 a can run layer 5"


# -- being stopped -----------------------------------------------------------------------------


def test_ctrl_c_leaves_the_best_so_far_with_its_bound() -> None:
    problem = replace(transformer(), layer_keys=None)
    full = ExactPartitioner().partition(problem)
    prices = 0

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        nonlocal prices
        prices += 1
        if prices == full.num_queries:
            raise KeyboardInterrupt
        return problem.cost(first, last, shape)

    found = ExactPartitioner().partition(replace(problem, cost=cost))
    assert found.status is Status.INTERRUPTED
    check_sound(problem, found.stages)
    assert found.lower_bound_s <= full.cost_s * (1 + 1e-9) <= found.cost_s * (1 + 2e-9)


def test_ctrl_c_before_anything_was_found_is_passed_on() -> None:
    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ExactPartitioner().partition(replace(transformer(), cost=cost))


def test_without_time_there_is_nothing_and_no_claim() -> None:
    found = ExactPartitioner(time_limit_s=0.0).partition(transformer())
    assert found.status is Status.NOT_FOUND
    assert (found.stages, found.cost_s) == ((), math.inf)
    assert found.lower_bound_s <= ExactPartitioner().partition(transformer()).cost_s


def test_the_relative_gap_ends_the_search() -> None:
    exact, near = (ExactPartitioner(relative_gap=gap).partition(transformer()) for gap in (1e-9, 0.5))
    assert near.status in (Status.CLOSE, Status.OPTIMAL)
    assert near.lower_bound_s <= exact.cost_s * (1 + 1e-9)
    assert near.cost_s <= 2 * exact.cost_s
    assert near.num_queries <= exact.num_queries


def test_progress_tells_cost_and_bound_until_they_meet() -> None:
    told: list[tuple[float, float]] = []
    found = ExactPartitioner(progress=lambda cost, bound: told.append((cost, bound))).partition(transformer())
    costs, bounds = zip(*told, strict=True)
    assert list(costs) == sorted(costs, reverse=True)
    assert list(bounds) == sorted(bounds)
    assert told[-1] == pytest.approx((found.cost_s, found.cost_s), rel=1e-8)


@pytest.mark.parametrize(
    "partitioner", [ExactPartitioner(), EqualSubmeshPartitioner(lambda count: in_turn(PipelineShape(count, 1)))]
)
def test_a_limit_ends_the_search_with_nothing_above_it(partitioner: Any) -> None:
    problem = transformer()
    best = partitioner.partition(problem)
    assert best.status is Status.OPTIMAL
    above = partitioner.partition(replace(problem, limit_s=1.5 * best.cost_s))
    assert above.cost_s == pytest.approx(best.cost_s, rel=1e-9)
    below = partitioner.partition(replace(problem, limit_s=0.5 * best.cost_s))
    assert not below.stages and below.status is Status.NOT_FOUND and not below.reason
    assert below.num_queries <= best.num_queries
    impossible = partitioner.partition(replace(problem, limit_s=best.cost_s, budget_bytes={"a": 0.0}))
    assert impossible.status is Status.INFEASIBLE and impossible.reason, "memory is the reason, not the limit"


# -- several runs on each submesh --------------------------------------------------------------


IN_TWO_DIRECTIONS = ScheduleKind(
    name="in two directions",
    description="Each stage on two submeshes.",
    orders=lambda shape: (),
    placement=lambda shape: tuple((n, shape.num_submeshes - 1 - n) for n in range(shape.num_submeshes)),
)
#: Placements with the numbers of virtual stages that suit them.
PLACED = (("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("zb-v", 2), ("in two directions", 1))


def placed_by(name: str, virtual: int) -> Callable[[int], Placement]:
    kind = IN_TWO_DIRECTIONS if name == IN_TWO_DIRECTIONS.name else find(name)
    return lambda num_submeshes: kind.placement(PipelineShape(num_submeshes, 1, virtual))


@st.composite
def placed_problems(draw: st.DrawFn) -> tuple[PartitionProblem, Callable[[int], Placement]]:
    num_layers, (name, virtual) = draw(st.integers(1, 7)), draw(st.sampled_from(PLACED))
    tables = Tables(draw(st.integers(0, 10_000)), num_layers, Growth.SUPERADDITIVE)
    problem = PartitionProblem(
        num_layers=num_layers,
        cluster=draw(st.sampled_from(CLUSTERS)),
        cost=tables.cost,
        transfer_s=tables.transfer_s,
        objective=objective_named("interleaved" if virtual > 1 else "gpipe", draw(st.integers(1, 6)), virtual),
        budget_bytes={"a": float(draw(st.integers(10, 150))), "b": float(draw(st.sampled_from([30, 1000])))},
        growth=Growth.SUPERADDITIVE,
    )
    return problem, placed_by(name, virtual)


def on_submeshes(row: Sequence[Submesh], places: Sequence[int]) -> tuple[Submesh, tuple[Submesh, ...]]:
    """The submesh of a stage's first replica, and those of the others."""
    first, *others = (row[place] for place in dict.fromkeys(places))
    return first, tuple(others)


def every_placed(
    problem: PartitionProblem, placement: Callable[[int], Placement]
) -> Iterator[tuple[tuple[Stage, ...], float]]:
    """All with the first submeshes of each shape, with what they cost."""
    objective = problem.objective
    for shape in problem.all_shapes:
        row: list[Submesh] = []
        free = 0
        line = lines(problem.cluster, problem.all_shapes)[0]
        for mesh, start in zip(line.submeshes, line.start.tolist(), strict=True):
            if mesh.shape != shape or start < free:
                continue
            row.append(mesh)
            free = start + shape.num_devices
            count, places = len(row), placement(len(row))
            for cuts in itertools.combinations(range(1, problem.num_layers), len(places) - 1):
                ends = [*cuts, problem.num_layers]
                stages = tuple(
                    Stage(a, b - 1, *on_submeshes(row, places[j]))
                    for j, (a, b) in enumerate(zip([0, *cuts], ends, strict=True))
                )
                costs = [problem.cost(s.first, s.last, shape) for s in stages]
                once = repeated = 0.0
                for j, cost in enumerate(costs):
                    assert cost is not None
                    sent = 0.0
                    if j + 1 < len(stages):
                        ways = [(row[a], row[b]) for a, b in zip(places[j], places[j + 1], strict=True) if a != b]
                        sent = max(
                            (problem.transfer_s(stages[j].last + 1, shape, shape, a.shares_host(b)) for a, b in ways),
                            default=0.0,
                        )
                    once += objective.once_s(cost) + objective.transfer_once * sent
                    repeated = max(repeated, objective.repeated_s(cost) + objective.transfer_repeated * sent)
                for number in range(count):
                    mine = [cost for j, cost in enumerate(costs) if cost is not None and number in places[j]]
                    held = sum(c.state_bytes for c in mine) + max(c.working_bytes for c in mine)
                    held += objective.in_flight(count - 1 - number, count) * max(c.flight_bytes for c in mine)
                    if held > problem.budget_bytes[shape.kind]:
                        once = math.inf
                yield stages, once + repeated


@settings(max_examples=100, deadline=None)
@given(placed_problems())
def test_several_stages_on_each_submesh_equal_looking_at_every_partition(
    drawn: tuple[PartitionProblem, Callable[[int], Placement]],
) -> None:
    problem, placement = drawn
    found = EqualSubmeshPartitioner(placement).partition(problem)
    least = min((cost for _, cost in every_placed(problem, placement)), default=math.inf)
    if math.isinf(least):
        assert found.status is Status.INFEASIBLE
        assert found.reason
        return
    assert found.status is Status.OPTIMAL
    assert found.cost_s == pytest.approx(least, rel=1e-9)
    assert dict(every_placed(problem, placement))[found.stages] == pytest.approx(least, rel=1e-9)


def test_interleaved_notices_where_runs_do_not_add_up() -> None:
    """Submeshes of two hosts send more than those of one: what a search is begun with anew is priced as it was found."""
    adding_up = transformer(num_layers=6)

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        plain = adding_up.cost(first, last, shape)
        assert plain is not None
        return replace(plain, forward_s=plain.forward_s + 0.5)

    problem = replace(adding_up, cost=cost, objective=objective_named("interleaved", 8, 2))
    found = EqualSubmeshPartitioner(placed_by("interleaved", 2)).partition(problem)
    every = dict(every_placed(problem, placed_by("interleaved", 2)))
    assert found.slack_s > 0
    assert every[found.stages] == pytest.approx(found.cost_s, rel=1e-9)
    assert found.cost_s == pytest.approx(min(every.values()), rel=1e-9)


def test_interleaved_has_the_published_makespan() -> None:
    """(m + (p - 1) / v) t for p equal submeshes with v runs, t in all, and m microbatches."""
    problem = replace(transformer(), cost=lambda i, j, shape: StageCost(forward_s=j - i + 1.0, backward_s=j - i + 1.0))
    shape = SubmeshShape("a", 1, 4)
    problem = replace(
        problem,
        objective=objective_named("interleaved", 8, 3),
        shapes=(shape,),
        transfer_s=lambda *_: 0.0,
        layer_keys=["block"] * 12,
    )
    found = EqualSubmeshPartitioner(placed_by("interleaved", 3)).partition(problem)
    assert len(found.stages) == 6
    assert found.cost_s == pytest.approx((8 + 1 / 3) * 12.0)


def test_a_search_that_is_cut_short_says_how_far_it_came() -> None:
    problem = replace(transformer(), objective=objective_named("interleaved", 8, 2), budget_bytes={"a": 40.0})
    exact, short = (
        EqualSubmeshPartitioner(placed_by("interleaved", 2), step_limit=limit).partition(problem)
        for limit in (10**6, 1)
    )
    assert exact.status is Status.OPTIMAL
    assert short.status in (Status.NOT_FOUND, Status.STEPPED)
    assert short.lower_bound_s <= exact.cost_s * (1 + 1e-9) <= short.cost_s * (1 + 2e-9)


# -- branches ----------------------------------------------------------------------------------


def inception(num_modules: int, seconds: tuple[float, ...] = (3.0, 4.0, 3.0, 2.0)) -> tuple[PartitionProblem, Branches]:
    """Modules of a fork, four branches and a join; twice as quick on two devices, but for what that sends."""
    works: list[float] = []
    edges: list[tuple[int, int]] = []
    join = None
    for _ in range(num_modules):
        fork = len(works)
        works.append(0.5)
        if join is not None:
            edges.append((join, fork))
        join = fork + 1 + len(seconds)
        for branch, work in enumerate(seconds, start=fork + 1):
            works.append(work)
            edges += [(fork, branch), (branch, join)]
        works.append(0.5)

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        work = sum(works[first : last + 1])
        taken = work / shape.num_devices + (0.4 * (last - first + 1) if shape.num_devices > 1 else 0.0)
        return StageCost(forward_s=taken, backward_s=2 * taken, state_bytes=work)

    problem = PartitionProblem(
        num_layers=len(works),
        cluster=Cluster((DeviceGroup("a", 1, 2),)),
        cost=cost,
        transfer_s=lambda *_: 0.1,
        objective=objective_named("1f1b", 1),
        budget_bytes={"a": 1e9},
        growth=Growth.SUPERADDITIVE,
    )
    return problem, Branches(problem, edges, lambda layer, part, same_host: 0.1)


def makespan(branches: Branches, stages: tuple[Stage, ...]) -> float:
    """One microbatch there and back, each task begun as soon as its device is free and what it reads is there."""
    where: dict[int, tuple[int, SubmeshShape, int]] = {}
    for number, stage in enumerate(stages):
        shape = stage.submesh.shape
        part = replace(shape, devices_per_host=shape.devices_per_host // shape.parts, parts=1)
        for segment in branches.segments(stage):
            for index, layers in enumerate(segment):
                where |= dict.fromkeys(layers, (number, part, index))
    order = [
        layer for stage in stages for segment in branches.segments(stage) for layers in segment for layer in layers
    ]
    assert sorted(order) == list(range(branches.problem.num_layers))
    free: dict[tuple[int, int], float] = {}
    ended: dict[tuple[str, int], float] = {}
    forward = [("forward", u, [v for v, w in branches.edges if w == u]) for u in order]
    backward = [("backward", u, [w for v, w in branches.edges if v == u]) for u in reversed(order)]
    for phase, layer, read in [*forward, *backward]:
        number, part, index = where[layer]
        cost = branches.problem.cost(layer, layer, part)
        assert cost is not None
        begin = free.get((number, index), 0.0)
        for other in read:
            sent = 0.0 if where[other][::2] == (number, index) else 0.05
            begin = max(begin, ended[phase, other] + sent)
        end = begin + (cost.forward_s if phase == "forward" else cost.backward_s)
        ended[phase, layer] = free[number, index] = end
    return max(ended.values())


@pytest.mark.parametrize("num_modules", [1, 3])
def test_parallel_branches_on_two_devices_beat_the_chain(num_modules: int) -> None:
    problem, branches = inception(num_modules)
    chain = ExactPartitioner().partition(problem)
    spread = ExactPartitioner().partition(branches.with_split_submeshes())
    assert spread.status is chain.status is Status.OPTIMAL
    assert [stage.submesh.shape.parts for stage in spread.stages] == [2]
    assert spread.cost_s < 0.85 * chain.cost_s
    assert makespan(branches, spread.stages) <= spread.cost_s * (1 + 1e-9)
    assert makespan(branches, spread.stages) < 0.85 * makespan(branches, chain.stages)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5), st.sampled_from(CLUSTERS))
def test_branches_never_lose_to_the_chain(seed: int, num_layers: int, microbatches: int, cluster: Cluster) -> None:
    rng = np.random.default_rng(seed)
    tables = Tables(seed, num_layers, Growth.SUPERADDITIVE)
    problem = PartitionProblem(
        num_layers=num_layers,
        cluster=cluster,
        cost=tables.cost,
        transfer_s=tables.transfer_s,
        objective=objective_named("1f1b", microbatches),
        budget_bytes={"a": float(rng.integers(30, 200)), "b": 1000.0},
        growth=Growth.SUPERADDITIVE,
    )
    edges = [(u, v) for u in range(num_layers) for v in range(u + 1, num_layers) if rng.random() < 0.4]
    chain = ExactPartitioner().partition(problem)
    branches = Branches(problem, edges, lambda layer, part, same_host: 0.5)
    spread = ExactPartitioner().partition(branches.with_split_submeshes())
    assert spread.cost_s <= chain.cost_s * (1 + 1e-9) or not chain.stages
    for stage in spread.stages:
        done = [layer for segment in branches.segments(stage) for layers in segment for layer in layers]
        assert sorted(done) == list(range(stage.first, stage.last + 1))
        before: set[int] = set(range(stage.first))
        for segment in branches.segments(stage):
            for layers in segment:  # what a part reads was made before, or by itself
                read = {u for u, v in edges if v in layers}
                assert read <= before | set(layers)
            before |= {layer for layers in segment for layer in layers}


@settings(max_examples=25, deadline=None)
@given(problems())
def test_costs_queried_together_give_the_same_partition(problem: PartitionProblem) -> None:
    one_by_one = ExactPartitioner().partition(problem)
    together = ExactPartitioner().partition(replace(problem, together=True))
    assert together.cost_s == pytest.approx(one_by_one.cost_s)


# -- baselines ---------------------------------------------------------------------------------


def baselines(problem: PartitionProblem) -> list[Partition]:
    flops = [0.5, *[1.0] * (problem.num_layers - 2), 1.5][: problem.num_layers]
    cuts = [float(i % 3 + 1) for i in range(problem.num_layers)]
    return [
        EqualLayers().partition(problem),
        EqualOperators(flops).partition(problem),
        MinCut(flops, cuts).partition(problem),
        RandomSearch(100).partition(problem),
        Reinforce(flops, num_episodes=100).partition(problem),
    ]


@settings(max_examples=25, deadline=None)
@given(problems(Growth.UNKNOWN))
def test_no_baseline_is_better_than_what_is_proven(problem: PartitionProblem) -> None:
    least = ExactPartitioner().partition(problem)
    for found in baselines(problem):
        if found.stages:
            check_sound(problem, found.stages)
            assert found.cost_s == pytest.approx(evaluate(problem, found.stages))
        assert found.cost_s >= least.cost_s * (1 - 1e-9)


def test_every_baseline_finds_something_and_the_same_again() -> None:
    problem = transformer()
    for found, again in zip(baselines(problem), baselines(problem), strict=True):
        assert found.stages
        assert found == again


def test_the_policy_learns() -> None:
    """What it has learnt is better than what it began with: the same number of partitions without learning."""
    problem = transformer(num_layers=16, num_microbatches=32)
    flops = [1.0] * 16
    few, many = (Reinforce(flops, num_episodes=n, seed=3).partition(problem) for n in (20, 400))
    assert many.cost_s < few.cost_s


# -- layers ------------------------------------------------------------------------------------


def brute_force_layers(
    flops: list[float], cuts: list[float], num_layers: int, delta: float
) -> tuple[float, float] | None:
    """Fewest bytes, and then squares, of all that keep to delta."""
    mean = sum(flops) / num_layers
    found: list[tuple[float, float]] = []
    for starts in itertools.combinations(range(1, len(flops)), num_layers - 1):
        sizes = [sum(flops[a:b]) for a, b in zip([0, *starts], [*starts, len(flops)], strict=True)]
        if all(abs(size - mean) <= (delta + 1e-9) * mean for size in sizes):
            found.append((sum(cuts[s] for s in starts), sum((size / mean) ** 2 for size in sizes)))
    return min(found, default=None)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_clustering_equals_looking_at_every_cut(data: st.DataObject) -> None:
    flops = [float(f) for f in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))]
    cuts = [float(c) for c in data.draw(st.lists(st.integers(1, 9), min_size=len(flops), max_size=len(flops)))]
    num_layers = data.draw(st.integers(1, len(flops)))
    found = cluster_layers(flops, cuts, num_layers=num_layers, delta=0.2)
    assert len(found.starts) == num_layers
    assert found.cut_bytes == sum(cuts[s] for s in found.starts[1:])
    if max(flops) > sum(flops) / num_layers * (1 + 1e-9):
        return  # such an operator counts as one mean
    best = brute_force_layers(flops, cuts, num_layers, found.delta)
    assert best is not None
    assert found.cut_bytes == best[0]
    if found.delta > 0.2:
        assert brute_force_layers(flops, cuts, num_layers, found.delta / 1.5) is None


BLOCK_FLOPS = [0.0, 3.0, 2.0, 1.0, 0.0, 0.0, 4.0, 4.0, 0.0, 0.0]
BLOCK_CUTS = [8.0, 16.0, 30.0, 24.0, 16.0, 8.0, 16.0, 40.0, 40.0, 16.0]  # as few after attention as between blocks


def repeated(flops: Sequence[float], cuts: Sequence[float], **options: Any) -> Clustering:
    found = repeated_layers(flops, cuts, **options)
    assert found is not None
    return found


@pytest.mark.parametrize("num_layers", [None, 12, 6, 4])
def test_equal_blocks_give_equal_layers(num_layers: int | None) -> None:
    flops, cuts = BLOCK_FLOPS * 12, BLOCK_CUTS * 12
    found = repeated(flops, cuts) if num_layers is None else cluster_layers(flops, cuts, num_layers=num_layers)
    size = 120 // (num_layers or 12)
    assert found.starts == tuple(range(0, 120, size))
    assert set(found.keys) == {0}


def test_blocks_between_an_embedding_and_a_head_stay_whole() -> None:
    """The cut after the tokens is the cheapest of all, and the head is four blocks' work."""
    flops = [0.0, 0.0, 0.0, *BLOCK_FLOPS * 12, 0.0, 56.0, 1.0]
    cuts = [0.5, 0.5, 0.5, *BLOCK_CUTS * 12, 8.0, 8.0, 8.0]
    found = repeated(flops, cuts)
    assert found.starts[1:] == tuple(3 + 10 * block for block in range(1, 13))
    assert len(set(found.keys[1:-1])) == 1
    assert found.repeats([1] * len(flops))


def test_iterations_of_a_loop_repeat_though_more_equations_lie_around_it() -> None:
    """Eight iterations of a hundred equations each, and forty single equations: most of what is planned repeats."""
    flops, cuts = [*[100.0] * 8, *[1.0] * 40], [9.0] * 48
    found = repeated(flops, cuts)
    assert not found.repeats([1] * 48)
    assert found.repeats([*[100] * 8, *[1] * 40])


def test_more_modules_than_layers_are_shared_out_equally() -> None:
    found = repeated(BLOCK_FLOPS * 30, BLOCK_CUTS * 30, most_layers=12)
    assert len(found.starts) == 10
    assert set(found.keys) == {0}


def test_operators_that_do_not_repeat_are_no_repeated_layers() -> None:
    assert repeated_layers([5.0, 3.0, 2.0, 4.0, 1.0, 6.0, 2.5, 1.5], [1.0] * 8) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_cheapest_cuts_are_one_in_each_part_of_the_time(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=30))
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=len(seconds), max_size=len(seconds)))
    num_layers = data.draw(st.integers(1, 12))
    least = data.draw(st.integers(1, len(seconds)))
    found = cheapest_cuts(seconds, cuts, num_layers, least)
    assert found.starts[0] == 0
    assert list(found.starts) == sorted(set(found.starts))
    assert least <= len(found.starts) <= max(num_layers, least)
    assert found.cut_bytes == sum(cuts[n] for n in found.starts[1:])
    total, parts = sum(seconds) or 1, defaultdict[int, list[int]](list)
    for n in range(1, len(seconds)):
        parts[int(num_layers * sum(seconds[:n]) / total + 0.5)].append(n)
    for part in range(1, num_layers):
        if parts[part]:
            assert min(cuts[n] for n in parts[part]) in [cuts[n] for n in parts[part] if n in found.starts]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cuts_near_chosen_ones_are_the_cheapest_of_each_place(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=40))
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=len(seconds), max_size=len(seconds)))
    chosen = sorted(data.draw(st.sets(st.integers(1, len(seconds) - 1), min_size=1)))
    window, until = data.draw(st.integers(0, 9)), np.concatenate([[0], np.cumsum(seconds)])
    found = cuts_near(chosen, seconds, cuts, window, 0.5).starts
    assert {0, *chosen} <= set(found)
    for start in chosen:
        for way in (range(start, 0, -1), range(start, len(seconds))):
            away = [abs(until[cut] - until[start]) for cut in way]
            nearest = sorted(set(away))[:3]
            for cut, distance in zip(way, away, strict=True):
                if distance <= window or distance in nearest:
                    same = [n for n in found[1:] if until[n] == until[cut]]
                    assert same
                    assert min(cuts[n] for n in same) <= cuts[cut]


def test_equal_layers_have_equal_keys() -> None:
    found = cluster_layers([1.0, 1.0, 1.0, 1.0], [1.0] * 4, num_layers=4, keys=["a", "b", "a", "a"])
    assert found.keys == (0, 1, 0, 0)


# -- clusters ----------------------------------------------------------------------------------


def test_a_host_of_eight_and_two_of_four_have_these_submeshes() -> None:
    cluster = Cluster((DeviceGroup("a", 1, 8), DeviceGroup("b", 2, 4)))
    sizes = {kind: sorted(s.num_devices for s in cluster.shapes() if s.kind == kind) for kind in cluster.kinds}
    assert sizes == {"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": [1, 2, 3, 4, 8]}
    for line in lines(cluster, cluster.shapes()):
        for mesh in line.submeshes:
            hosts = {d_host(cluster, device) for device in mesh.devices}
            assert len(hosts) == mesh.shape.num_hosts
            assert min(hosts) == mesh.first_host


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ((), "at least one DeviceGroup"),
        ((DeviceGroup("a", 0, 8),), "`num_hosts` must be a whole number of at least 1; got 0"),
        ((DeviceGroup("a", 1, -1),), "`devices_per_host` must be a whole number of at least 1; got -1"),
        ((DeviceGroup("", 1, 1),), "needs a kind of device"),
        ((DeviceGroup("a", 1, 8), DeviceGroup("a", 2, 8)), r"merge them into DeviceGroup\('a', 3, 8\)"),
        (tuple(DeviceGroup(kind, 1, 1) for kind in "abcde"), "5 groups of hosts; at most 4"),
    ],
)
def test_an_impossible_cluster_is_refused(groups: tuple[DeviceGroup, ...], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        Cluster(groups)


def test_a_kind_without_a_budget_is_refused() -> None:
    with pytest.raises(ClusterError, match="devices of kind 'a', but there is a memory budget for: h100"):
        replace(transformer(), budget_bytes={"h100": 1.0})
    with pytest.raises(ClusterError, match="at most 0 stages leave no place for a layer"):
        replace(transformer(), max_stages=0)


def test_prices_of_a_partition_are_those_of_its_stages() -> None:
    problem = transformer()
    found = ExactPartitioner().partition(problem)
    assert Prices(problem).evaluate(found.stages) == pytest.approx(evaluate(problem, found.stages), rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_tables_of_all_costs_change_nothing(schedule: str) -> None:
    problem = replace(transformer(), growth=Growth.UNKNOWN, objective=objective_named(schedule, 8))
    count = problem.num_layers

    def table(shape: SubmeshShape, factor: float) -> StageCost:
        figures: dict[str, Any] = {field.name: np.full((count, count), np.nan) for field in fields(StageCost)}
        for first in range(count):
            for last in range(first, count):
                cost = problem.cost(first, last, shape)
                assert cost is not None
                for name, figure in figures.items():
                    figure[first, last] = factor * getattr(cost, name)
        return StageCost(**figures)

    def never(*_: object) -> StageCost:
        raise AssertionError("the tables have all costs")

    tables = CostTables(lambda shape: table(shape, 1.0), lambda shape: table(shape, 0.9))
    plain = ExactPartitioner().partition(problem)
    found = ExactPartitioner().partition(replace(problem, cost=never, bound=never, tables=tables))
    assert found.cost_s == pytest.approx(plain.cost_s, rel=1e-9)
    assert found.stages == plain.stages
    assert found.num_queries <= plain.num_queries
