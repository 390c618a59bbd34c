"""Stages found for real steps: the costs of layers, and the choice of stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from pipelines import tanh_layers

from autopar.cost.kernel_time import op_seconds
from autopar.hardware.profile import HardwareProfile, LinkProfile, load
from autopar.ir.device_program import Gemm, Op
from autopar.ir.mesh import parse_mesh
from autopar.pipeline.cut.exchanges import passing_of
from autopar.pipeline.cut.stage_programs import Cuttable, layers_between
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.cluster_layers import Clustering, cluster_layers
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.microbatch_search import divisors, over_microbatches
from autopar.pipeline.search.stage_costs import StageCosts, likely_shapes
from autopar.pipeline.search.stage_search import Outcome, StagedStep, StageSearch
from autopar.transforms.program import program_of

LAYERS, WIDTH, BATCH, MICROBATCHES = 8, 8192, 16384, 8
H100 = load("h100-sxm")
#: Hosts that are joined by links much slower than those inside.
SLOW = replace(H100, network_link=LinkProfile(H100.host_link.bytes_per_s / 25, 1e-5), devices_per_host=2)


@cache
def cuttable() -> tuple[Cuttable, Clustering]:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    args = (params, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
    found = Cuttable.of(program_of(tanh_layers, args, carry=None, donate=None))
    chain = found.chain
    return found, cluster_layers(chain.flops, [0.0, *chain.cut_bytes], num_layers=LAYERS)


@cache
def prices(*profiles: HardwareProfile, num_microbatches: int = MICROBATCHES) -> StageCosts:
    found, clusters = cuttable()
    layers = found.layers(clusters.starts, num_microbatches)
    return StageCosts(layers, {one.name: one for one in profiles}, clusters.keys, splits_backward=True)


def search_on(cluster: Cluster, *profiles: HardwareProfile, num_microbatches: int = MICROBATCHES) -> StageSearch:
    found, clusters = cuttable()
    costs = prices(*profiles, num_microbatches=num_microbatches)
    passing = passing_of(found.flow, layers_between(clusters.starts, len(found.flow.forward)))
    budget = {one.name: one.usable_bytes for one in profiles}
    return StageSearch(
        cost=costs.cost,
        keys=clusters.keys,
        passing=[replace(one, num_bytes=one.num_bytes / num_microbatches) for one in passing],
        cluster=cluster,
        profiles={one.name: one for one in profiles},
        budget_bytes=budget,
        shapes=costs.in_options(likely_shapes(cluster), budget),
        num_microbatches=num_microbatches,
        alone=costs.alone,
        bound=costs.bound,
    )


def search(profile: HardwareProfile, hosts: int, per_host: int, num_microbatches: int = MICROBATCHES) -> StagedStep:
    cluster = Cluster((DeviceGroup(profile.name, hosts, per_host),))
    best = search_on(cluster, profile, num_microbatches=num_microbatches).best()
    assert best is not None
    return best


def test_a_run_of_equal_layers_is_priced_by_shorter_ones() -> None:
    costs = prices(H100)
    one = SubmeshShape(H100.name, 1, 2)
    first, last = 1, LAYERS - 2
    assert len(set(costs.keys[first : last + 1])) == 1
    told, planned = costs.cost(first, last, one), costs.planned(first, last, one).cost
    passes = [cost.forward_s + cost.backward_s + cost.weight_s for cost in (told, planned)]
    assert passes[0] == pytest.approx(passes[1], rel=0.1)
    # Two layers that share a reduction keep fewer values than two alone, and layers alternate between two shardings where
    # their gradients are reduced once: the sum of pairs expresses neither in full.
    assert told.update_s == pytest.approx(planned.update_s, rel=0.3)
    for cost in (told, planned):
        assert min(cost.forward_s, cost.backward_s, cost.weight_s) > 0.15 * passes[1]
    assert told.bytes_with(2) == pytest.approx(planned.bytes_with(2), rel=0.25)
    assert told.flight_bytes == pytest.approx(planned.flight_bytes, rel=0.25)


def test_what_a_stage_takes_is_what_its_program_says() -> None:
    """On one device all can be counted: the products' FLOPs, parameters, what the backward pass needs."""
    costs = prices(H100)
    cost = costs.cost(1, 2, SubmeshShape(H100.name, 1, 1))
    rows = BATCH // MICROBATCHES
    product = Op("gemm", 0, (), (), 0.0, 0.0, gemm=Gemm(1, rows, WIDTH, WIDTH, "float32", "float32"))
    product_s = op_seconds(product, parse_mesh("1"), H100)
    assert cost.forward_s == pytest.approx(2 * product_s, rel=0.5)
    assert cost.backward_s + cost.weight_s == pytest.approx(4 * product_s, rel=0.5)
    assert cost.weight_s == pytest.approx(2 * product_s, rel=0.5)
    parameters = 2 * WIDTH * WIDTH * 4
    assert cost.state_bytes == pytest.approx(2 * parameters, rel=0.1)  # and as large a sum of gradients
    activation = rows * WIDTH * 4
    assert 2 * activation <= cost.flight_bytes <= 5 * activation


def test_where_nothing_is_gained_there_is_one_stage() -> None:
    assert len(search(H100, 1, 2, num_microbatches=1).stages) == 1


def test_slow_links_between_hosts_are_a_reason_for_stages() -> None:
    best = search(SLOW, 2, 2)
    assert len(best.stages) > 1
    assert {stage.submesh.shape.num_hosts for stage in best.stages} == {1}
    whole = prices(SLOW).cost(0, LAYERS - 1, SubmeshShape(SLOW.name, 2, 2))
    alone = MICROBATCHES * (whole.forward_s + whole.backward_s + whole.weight_s) + whole.update_s
    assert best.step_time_s < alone


def test_a_budget_that_one_stage_breaks_is_kept_by_more() -> None:
    found = search(H100, 1, 4)
    limit = 0.6 * max(found.peak_bytes) if len(found.stages) == 1 else max(found.peak_bytes)
    tight = replace(H100, hbm_bytes=int(limit / H100.usable_fraction))
    kept = search(tight, 1, 4)
    assert max(kept.peak_bytes) <= tight.usable_bytes


def test_never_worse_than_one_stage_or_one_device_each() -> None:
    found = search_on(Cluster((DeviceGroup(SLOW.name, 2, 2),)), SLOW)
    best, alone, apart = found.best(), found.one_stage().step, found.one_device_each().step
    assert best is not None
    assert alone is not None
    assert apart is not None
    assert len(alone.stages) == 1
    assert {stage.submesh.shape.num_devices for stage in apart.stages} == {1}
    assert best.step_time_s <= min(alone.step_time_s, apart.step_time_s)


def test_one_stage_is_not_planned_beside_one_program() -> None:
    """The limit is the time of one program on all devices, which one stage is too."""
    without = search_on(Cluster((DeviceGroup(SLOW.name, 2, 2),)), SLOW)
    limited = replace(without, limit_s=1e3)
    assert math.isfinite(without.outcome().one_stage_s)
    found = limited.outcome()
    assert math.isinf(found.one_stage_s)
    assert found.step is not None
    assert len(found.step.stages) > 1


def test_two_kinds_of_devices() -> None:
    """The faster kind gets more of the layers, and no submesh is of both."""
    a100 = load("a100-sxm-80")
    kinds = Cluster((DeviceGroup(a100.name, 1, 1), DeviceGroup(H100.name, 1, 1)))
    best = search_on(kinds, a100, H100).best(("1f1b",))
    assert best is not None
    layers = {stage.submesh.shape.kind: stage.last - stage.first + 1 for stage in best.stages}
    assert layers.keys() == {a100.name, H100.name}
    assert layers[H100.name] > layers[a100.name]


def test_what_does_not_fit_says_what_is_missing() -> None:
    small = replace(H100, hbm_bytes=int(1e9))
    outcome = search_on(Cluster((DeviceGroup(small.name, 1, 2),)), small).outcome(("1f1b",))
    assert outcome.step is None
    assert "more than the budget" in outcome.reason


def test_the_best_number_of_microbatches_is_among_the_tried() -> None:
    cluster, numbers = Cluster((DeviceGroup(H100.name, 1, 2),)), (4, 8, 16, 32)

    def search_of(number: int, _: object) -> StageSearch:
        return search_on(cluster, H100, num_microbatches=number)

    tried = over_microbatches(search_of, numbers, 16, lambda found: found.one_device_each(("1f1b",)))
    times = {one.num_microbatches: one.step_time_s for one in tried}
    assert tried[0].step_time_s == min(times.values())
    at = numbers.index(tried[0].num_microbatches)
    for neighbour in numbers[max(at - 1, 0) : at + 2]:  # both sides of it were looked at
        assert neighbour in times


def test_one_stage_is_looked_at_again_only_where_it_may_be_quicker() -> None:
    """Half as many microbatches take no less than half the time, twice as many no less than all of it."""
    cluster = Cluster((DeviceGroup(H100.name, 1, 2),))
    looked_on = search_on(cluster, H100)
    step = looked_on.one_device_each(("1f1b",)).step
    assert step is not None

    def on_all(behind: float) -> dict[int, bool]:
        among: dict[int, Sequence[SubmeshShape] | None] = {}

        def search_of(number: int, shapes: Sequence[SubmeshShape] | None) -> StageSearch:
            among[number] = shapes
            return looked_on

        over_microbatches(search_of, (8, 16, 32), 16, lambda _: Outcome(step, one_stage_s=behind * step.step_time_s))
        assert among.pop(16) is None
        return {number: any(one.num_devices == 2 for one in shapes or ()) for number, shapes in among.items()}

    assert on_all(1.2) == {32: False, 8: True}
    assert on_all(10.0) == {32: False, 8: False}


def test_numbers_of_microbatches() -> None:
    assert divisors(12, 2) == (2, 3, 4, 6, 12)


@pytest.mark.parametrize("budget, option", [(100.0, 0), (30.0, 3)], ids=["memory for the fast option", "for the slow"])
def test_a_limit_finds_the_same_stages(budget: float, option: int) -> None:
    search, _ = search_with_options(budget)
    best = search.best(("1f1b",))
    assert best is not None and {stage.submesh.shape.option for stage in best.stages} == {option}
    limited = replace(search, limit_s=1.05 * best.step_time_s).best(("1f1b",))
    assert limited is not None
    assert (limited.stages, limited.step_time_s) == (best.stages, best.step_time_s)


def test_options_that_save_memory_are_not_priced_if_the_fastest_are_too_slow() -> None:
    search, priced = search_with_options(30.0)
    found = replace(search, limit_s=50.0).outcome(("1f1b",))
    assert found.step is None and found.is_slow and found.bound_s > 50.0
    assert priced == {0}
    found = replace(search, limit_s=1e3).outcome(("1f1b",))
    assert found.step is not None and priced == {0, 3}


def search_with_options(budget_bytes: float) -> tuple[StageSearch, set[int]]:
    """A search whose stages take a second per layer and pass in option 0, and more time and fewer bytes in option 3; and the
    options that it has priced."""
    cluster, priced = Cluster((DeviceGroup(H100.name, 1, 2),)), set[int]()

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost:
        priced.add(shape.option)
        seconds, held = (1.0, 20.0) if shape.option == 0 else (1.1, 5.0)
        layers = last - first + 1
        return StageCost(forward_s=layers * seconds, backward_s=2 * layers * seconds, state_bytes=held * layers)

    def bound(first: int, last: int, shape: SubmeshShape) -> StageCost:
        return StageCost(forward_s=0.5 * (last - first + 1))

    shapes = tuple(SubmeshShape(H100.name, 1, devices, option=option) for devices in (1, 2) for option in (0, 3))
    search = StageSearch(
        cost=cost,
        keys=range(LAYERS),
        passing=[],
        cluster=cluster,
        profiles={H100.name: H100},
        budget_bytes={H100.name: budget_bytes},
        shapes=shapes,
        num_microbatches=MICROBATCHES,
        num_stages=2,
        bound=bound,
    )
    return search, priced
