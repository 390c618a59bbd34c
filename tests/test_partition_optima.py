"""Stages whose sizes are chosen before their places: equal to Alpa's optima, and to all sizes, cuts and places."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from partitions import objective_named

from autopar.pipeline.partition import sizes_then_places
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.packing import Counted, Exact, Footprint, Packing, are_nested, packing_of, placed
from autopar.pipeline.partition.problem import PartitionProblem, StageCost
from autopar.solve.problem import Status
from benchmarks.pipeline import partition
from benchmarks.pipeline.partition import (
    NUM_TABLES,
    SMALL,
    alpa_problems,
    check_sound,
    d_host,
    evaluate,
    every_partition,
    measure,
    table,
)


def test_the_optimum_is_alpas() -> None:
    """With all devices in use, as Alpa demands, all 48 are equal; without that rule none is worse."""
    num_lower = 0
    for name, problem, optimum in alpa_problems():
        found = ExactPartitioner().partition(replace(problem, all_devices=True))
        assert found.status is Status.OPTIMAL, name
        assert found.cost_s == pytest.approx(optimum, rel=5e-6), name  # six decimals are known
        assert sum(stage.submesh.shape.num_devices for stage in found.stages) == problem.cluster.num_devices, name
        idle = ExactPartitioner().partition(problem)
        assert idle.cost_s <= found.cost_s * (1 + 1e-9), name
        num_lower += idle.cost_s < found.cost_s * (1 - 1e-9)
    assert num_lower == 16  # tables where idle devices help


# -- looking at everything ---------------------------------------------------------------------


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(NUM_TABLES))
def test_a_table_equals_looking_at_every_size_cut_and_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the exact rule at once, as on few devices, and by one rule after another, as on many."""
    problem = table(seed)
    found = ExactPartitioner().partition(problem)
    monkeypatch.setattr(sizes_then_places, "_FEW_STATES", 0)
    step_by_step = ExactPartitioner().partition(problem)
    assert step_by_step.status is found.status, seed
    assert step_by_step.cost_s == pytest.approx(found.cost_s, rel=1e-9), seed
    every = ((evaluate(problem, stages), stages) for stages in every_partition(problem))
    least, best = min(every, key=lambda pair: pair[0], default=(math.inf, ()))
    if math.isinf(least):
        assert found.status is Status.INFEASIBLE, seed
        assert found.reason
        return
    assert found.status is Status.OPTIMAL, (seed, best)
    check_sound(problem, found.stages)
    assert evaluate(problem, found.stages) == pytest.approx(found.cost_s, rel=1e-9)
    assert found.cost_s == pytest.approx(least, rel=1e-9), (seed, best, found.stages)
    assert found.lower_bound_s <= least * (1 + 1e-9)


# -- what comes out ----------------------------------------------------------------------------


def ends_on_one_device(num_hosts: int, per_host: int) -> PartitionProblem:
    """As many layers as hosts, and one more: only the first and the last run as fast on half a host."""

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        halves = sum(1 if layer in (0, num_hosts) else 2 for layer in range(first, last + 1))
        return StageCost(forward_s=1.0 if 2 * shape.num_devices >= halves * per_host else 10.0 * halves)

    return PartitionProblem(
        num_layers=num_hosts + 1,
        cluster=Cluster((DeviceGroup("a", num_hosts, per_host),)),
        cost=cost,
        transfer_s=lambda *_: 0.0,
        objective=objective_named("1f1b", 100),
        budget_bytes={"a": 1.0},
        num_stages=num_hosts + 1,
    )


@pytest.mark.parametrize(("num_hosts", "per_host"), [(4, 2), (2, 8), (8, 8), (3, 6)])
def test_the_first_and_the_last_stage_share_a_host(num_hosts: int, per_host: int) -> None:
    """In the order of the devices, they would be neighbours. Of 8 hosts of 8, the states of all hosts are too many."""
    problem = ends_on_one_device(num_hosts, per_host)
    shapes = tuple(s for s in problem.all_shapes if 2 * s.num_devices in (per_host, 2 * per_host))
    found = ExactPartitioner().partition(replace(problem, shapes=shapes))
    assert found.status is Status.OPTIMAL
    assert found.cost_s == pytest.approx(num_hosts + 1 + 99)
    assert found.stages[0].submesh.first_host == found.stages[-1].submesh.first_host == 0
    assert len({stage.submesh.first_host for stage in found.stages[1:-1]}) == num_hosts - 1
    assert found.among == "all cuts between layers and all placements of the priced submeshes"


def test_stages_stay_in_the_order_of_the_devices_where_that_is_as_good() -> None:
    problem = ends_on_one_device(2, 4)
    found = ExactPartitioner().partition(replace(problem, cost=lambda *_: StageCost(forward_s=1.0), num_stages=None))
    assert [stage.submesh.first_device for stage in found.stages] == [0]
    two = SubmeshShape("a", 1, 2)
    found = ExactPartitioner().partition(
        replace(
            problem,
            num_layers=4,
            num_stages=4,
            shapes=(two,),
            cost=lambda *_: StageCost(forward_s=1.0),
            transfer_s=lambda boundary, one, other, same_host: 0.1 if same_host else 0.2,
        )
    )
    assert [stage.submesh.first_device for stage in found.stages] == [0, 2, 4, 6]


def test_where_packings_are_too_many_the_order_of_the_devices_is_searched() -> None:
    """Sizes 3 and 5 do not nest in 8; the proof says what it is about."""
    problem = ends_on_one_device(8, 8)
    shapes = tuple(SubmeshShape("a", 1, size) for size in (1, 3, 5, 8))
    found = ExactPartitioner().partition(replace(problem, shapes=shapes, num_stages=None))
    assert found.status is Status.OPTIMAL
    assert found.among == "stages in the order of the devices"
    small = replace(problem, shapes=shapes, cost=lambda *_: StageCost(forward_s=1.0, state_bytes=2.0), num_stages=None)
    found = ExactPartitioner().partition(small)
    assert found.status is Status.INFEASIBLE
    assert "lacks at least as much" not in found.reason
    assert found.reason.endswith("(searched: stages in the order of the devices)")


def test_transfers_decide_which_stages_share_a_host() -> None:
    """Three stages on two hosts of two devices: those between which most passes are neighbours."""
    for dear in (1, 2):
        problem = PartitionProblem(
            num_layers=3,
            cluster=Cluster((DeviceGroup("a", 2, 2),)),
            cost=lambda first, last, shape: StageCost(forward_s=1.0) if first == last else None,
            transfer_s=lambda at, one, other, same_host, dear=dear: 0.1 if same_host else 5.0 if at == dear else 1.0,
            objective=objective_named("gpipe", 4),
            budget_bytes={"a": 1.0},
            shapes=(SubmeshShape("a", 1, 1),),
        )
        found = ExactPartitioner().partition(problem)
        hosts = [stage.submesh.first_host for stage in found.stages]
        assert found.cost_s == pytest.approx(3 * 4 / 4 + 3 + 0.1 + 1.0)
        assert (hosts[0] == hosts[1], hosts[1] == hosts[2]) == (dear == 1, dear == 2)


# -- what fits together ------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_counting_allows_has_a_place_where_sizes_nest(data: st.DataObject) -> None:
    num_hosts, per_host = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([2, 3, 4, 6, 8, 12]))
    other = data.draw(st.sampled_from([1, 2, 4]).filter(lambda size: size != per_host))
    cluster = Cluster((DeviceGroup("a", num_hosts, per_host), DeviceGroup("a", 1, other)))
    sizes = data.draw(st.sampled_from([(1, 2, 4, 8), (1, 2, 4), (1, 3, 6, 12), (2, 4, 8), (1, 5), (3,)]))
    every = tuple(Footprint("a", 1, size) for size in sizes if size <= per_host)
    every += tuple(Footprint("a", hosts, per_host) for hosts in range(2, num_hosts + 1))
    assume(every and are_nested(cluster, every))
    rule = Counted(cluster, every)
    state, taken = rule.start(), list[Footprint]()
    while moves := [(f, then) for f in every for _, then in rule.moves(state, f)]:
        footprint, state = data.draw(st.sampled_from(moves))
        taken.append(footprint)
    hops = [(0.0, 0.0)] * len(taken)
    where = placed(cluster, taken, hops, lambda a, b: a + b)
    assert where is not None, taken
    used = [d for f, (first, _) in zip(taken, where[1], strict=True) for d in range(first, first + f.num_devices)]
    assert len(used) == len(set(used)) <= cluster.num_devices
    for footprint, (first, host) in zip(taken, where[1], strict=True):
        assert {d_host(cluster, d) for d in range(first, first + footprint.num_devices)} == set(
            range(host, host + footprint.num_hosts)
        )


def test_submeshes_that_no_hosts_can_pack_are_refused() -> None:
    eight, six = (Cluster((DeviceGroup("a", 2, size),)) for size in (8, 6))
    for cluster, size, count in ((eight, 3, 4), (six, 4, 2), (six, 2, 6)):
        footprint = Footprint("a", 1, size)
        hops = [(0.0, 0.0)] * count
        assert placed(cluster, [footprint] * count, hops, lambda a, b: a + b) is not None
        assert placed(cluster, [footprint] * (count + 1), [*hops, (0.0, 0.0)], lambda a, b: a + b) is None
    assert not are_nested(eight, [Footprint("a", 1, 3)])
    assert are_nested(six, [Footprint("a", 1, size) for size in (1, 2, 4)])


@pytest.mark.parametrize("cluster", SMALL, ids=str)
def test_the_exact_rule_allows_no_more_than_counting(cluster: Cluster) -> None:
    every = tuple(dict.fromkeys(map(Footprint.of, cluster.shapes())))
    exact, counted = (packing_of(cluster, every, rule, 10_000) for rule in (Exact(cluster), Counted(cluster, every)))
    assert exact is not None and counted is not None

    def most(packing: Packing, footprint: int, state: int = 0) -> int:
        moves = {int(s) for of in (packing.inside, packing.across) for s in of[state, footprint]} - {packing.num_states}
        return max((1 + most(packing, footprint, then) for then in moves), default=0)

    for number, footprint in enumerate(every):
        allowed = most(exact, number)
        hops = [(0.0, 0.0)] * (allowed + 1)
        assert placed(cluster, [footprint] * allowed, hops, lambda a, b: a + b) is not None
        assert placed(cluster, [footprint] * (allowed + 1), hops, lambda a, b: a + b) is None
        assert allowed <= most(counted, number)


def test_the_benchmark_counts_what_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "NUM_TABLES", len(SMALL))
    for row in measure():
        assert row["equal"] == row["tables"] >= row["feasible"]
