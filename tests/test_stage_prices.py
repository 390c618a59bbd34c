"""Prices of stages: from few plans, compared with planned stages."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial

import pytest

from autopar.hardware.profile import LinkProfile, load
from autopar.ir.mesh import MeshShape
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.cluster_layers import Clustering, repeated_layers
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.microbatch_search import over_microbatches
from autopar.pipeline.search.plan_stages import StageRequest, searches_of
from autopar.pipeline.search.quick_plan import Form, QuickPlanner, Way
from autopar.pipeline.search.scaled_costs import ScaledCosts
from autopar.pipeline.search.stage_costs import OPTIONS, STASH_PRICES, STATE_PRICES, StageCosts
from autopar.pipeline.search.stage_search import StageSearch
from autopar.solve.ilp import Ilp
from autopar.transforms.program import program_of
from benchmarks.zoo.gpt import GptSizes, gpt

H100 = load("h100-sxm")
BATCH, MICROBATCHES = 64, 8


@cache
def cuttable() -> tuple[Cuttable, Clustering]:
    step, args = gpt(GptSizes(hidden=512, layers=4, heads=8, vocabulary=512, tokens=128, batch=BATCH)).target
    found = Cuttable.of(program_of(step, args, carry=None, donate=None))
    clusters = repeated_layers(found.chain.flops, [0.0, *found.chain.cut_bytes])
    assert clusters is not None
    return found, clusters


@cache
def prices() -> StageCosts:
    found, clusters = cuttable()
    layers = found.layers(clusters.starts, MICROBATCHES)
    return StageCosts(layers, {H100.name: H100}, clusters.keys, splits_backward=True)


def middle(costs: StageCosts) -> tuple[int, int]:
    """Two layers that are equal."""
    usual = costs.usual
    assert usual is not None
    assert len(set(costs.keys[usual : usual + 2])) == 1
    return usual, usual + 1


@pytest.mark.slow
@pytest.mark.parametrize("option", [0, 1, 2])
def test_a_price_is_that_of_the_stage_when_it_is_planned(option: int) -> None:
    costs = prices()
    first, last = middle(costs)
    shape = SubmeshShape(H100.name, 1, 2, option=option)
    told, planned = costs.cost(first, last, shape), costs.planned(first, last, shape).cost
    for name in ("forward_s", "state_bytes", "flight_bytes"):
        assert getattr(told, name) == pytest.approx(getattr(planned, name), rel=0.25), name
    # What is computed again may be of use to either part of the backward pass.
    assert told.backward_s + told.weight_s == pytest.approx(planned.backward_s + planned.weight_s, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_what_a_long_stage_holds_is_known_from_pairs(num_devices: int) -> None:
    """Also what is gathered before the first microbatch, of every layer, for all of them."""
    costs = prices()
    last = len(costs.keys) - 1
    assert last >= 3
    shape = SubmeshShape(H100.name, 1, num_devices)
    stage = cuttable()[0].settled(costs.layers.layer_of, [0] * (last + 1), MICROBATCHES)[0]
    told, planned = costs.cost(0, last, shape), costs.planned(0, last, shape, stage).cost
    for in_flight in (1, 4):
        assert told.bytes_with(in_flight) == pytest.approx(planned.bytes_with(in_flight), rel=0.05)


def test_what_is_dearer_to_hold_is_computed_again() -> None:
    costs = prices()
    first, last = middle(costs)
    held = [
        costs.cost(first, last, SubmeshShape(H100.name, 1, 1, option=option)) for option in range(len(STASH_PRICES))
    ]
    flights, seconds = [one.flight_bytes for one in held], [one.backward_s + one.weight_s for one in held]
    assert flights == sorted(flights, reverse=True)
    assert flights[0] > 4 * flights[-1]
    assert seconds == sorted(seconds)
    # All of a layer but matrix products' operands on its border: its input, once for each layer.
    rows = BATCH // MICROBATCHES * 128
    assert flights[-1] == pytest.approx((last - first + 1) * rows * 512 * 2, rel=0.05)


@pytest.mark.slow
def test_what_passes_is_all_that_the_backward_pass_reads() -> None:
    """Nothing that is computed again is read before it is, and what leaves the stage is made in the forward pass."""
    costs = prices()
    first, last = middle(costs)
    for option in range(len(STASH_PRICES)):
        run = costs.planned(first, last, SubmeshShape(H100.name, 1, 2, option=option))
        program = run.program.program.of(run.plan)
        layout = Layout(program.trace, run.program.inputs)
        phases = layout.phases()
        sent = set(layout.gives_inside.values())
        forward = {v for unit in layout.body if phases[unit.start] == "forward" for v in unit.results}
        activations = {v for v in sent if v not in layout.backward}
        assert activations, "the next stage waits for something"
        assert activations <= forward


@pytest.mark.slow
def test_state_that_is_dearer_has_fewer_copies() -> None:
    """Over slow links: over fast ones even what costs little to hold is split."""
    slow = replace(H100, host_link=replace(H100.host_link, bytes_per_s=H100.host_link.bytes_per_s / 10))
    found, clusters = cuttable()
    layers = found.layers(clusters.starts, MICROBATCHES)
    costs = StageCosts(layers, {H100.name: slow}, clusters.keys, splits_backward=True)
    first, last = middle(costs)
    states = []
    for price in STATE_PRICES:
        shape = SubmeshShape(H100.name, 1, 4, option=OPTIONS.index((price, STASH_PRICES[0])))
        states.append(costs.cost(first, last, shape).state_bytes)
    one = costs.cost(first, last, SubmeshShape(H100.name, 1, 1)).state_bytes
    assert states[0] > 2 * states[1] > 2 * states[2]
    assert states[2] == pytest.approx(one / 4, rel=0.2)  # casts are copies too, and gathered before they are dearest


@pytest.mark.slow
def test_no_price_is_below_its_bound() -> None:
    costs = prices()
    last = len(costs.keys) - 1
    for shape in (
        SubmeshShape(H100.name, 1, 2),
        SubmeshShape(H100.name, 1, 4, option=2),
        SubmeshShape(H100.name, 2, 8),
    ):
        for run in ((0, 0), (1, 2), (0, last)):
            bound, price = costs.bound(*run, shape), costs.cost(*run, shape)
            for field in fields(StageCost):
                assert getattr(bound, field.name) <= getattr(price, field.name) * (1 + 1e-9), (shape, run, field.name)


def test_asking_all_prices_plans_no_more_than_layers_and_pairs() -> None:
    costs = StageCosts(prices().layers, {H100.name: H100}, prices().keys)
    count, shape = len(costs.keys), SubmeshShape(H100.name, 1, 1)
    for first in range(count):
        for last in range(first, count):
            costs.cost(first, last, shape)
    different = len(set(costs.keys)) + len(set(zip(costs.keys, costs.keys[1:], strict=False)))
    assert costs.num_planned <= different


def test_sums_stay_pending_only_where_they_may() -> None:
    """Between programs of their own, a gradient's sum over devices is taken in each microbatch."""
    costs = prices()
    first, _ = middle(costs)
    program = costs.layers.run_of(first, first).program.forms[-1]
    planner, form = QuickPlanner(Ilp()), Form(program)
    slowly = {dtype: rate / 1e4 for dtype, rate in H100.peak_flops_per_s.items()}  # so that work is worth splitting
    slow = replace(H100, network_link=LinkProfile(1e8, 1e-5), devices_per_host=1, peak_flops_per_s=slowly)

    def pending(may: bool) -> int:
        """How many sums stay pending on four hosts of one device."""
        made = planner.planned_in(Way(MeshShape(("data",), (4,)), 0, pending=may), (form,), slow)
        f, choices = made.formulation, made.solution.choices
        carried = [v for node in f.graph.nodes if node.primitive == "enter_carry" for v in node.results]
        known = [(f.value_made[v][1], choices[f.value_made[v][0]]) for v in carried if v in f.value_made]
        assert known
        return sum(bool(shardings[choice].unreduced) for shardings, choice in known)

    assert pending(True) > 0
    assert pending(False) == 0


@pytest.mark.slow
def test_numbers_of_microbatches_are_estimated_from_one_layer() -> None:
    """Prices by proportion are near those of plans, and need few."""
    found, clusters = cuttable()
    known, other = (
        prices(),
        StageCosts(
            found.layers(clusters.starts, 2 * MICROBATCHES), {H100.name: H100}, clusters.keys, splits_backward=True
        ),
    )
    estimated = ScaledCosts(known, other)
    shapes = [SubmeshShape(H100.name, 1, 1, option=1), SubmeshShape(H100.name, 1, 2)]
    runs = [(first, last) for first in range(len(known.keys)) for last in range(first, len(known.keys))]
    guesses = {(run, shape): estimated.cost(*run, shape) for run in runs for shape in shapes}
    assert other.num_planned <= len(shapes)
    for (run, shape), guess in guesses.items():
        planned = other.cost(*run, shape)
        assert guess.forward_s + guess.backward_s + guess.weight_s == pytest.approx(
            planned.forward_s + planned.backward_s + planned.weight_s, rel=0.1
        )
        assert guess.state_bytes == pytest.approx(planned.state_bytes, rel=1e-3)


@pytest.mark.slow
def test_a_climb_by_estimates_ends_where_one_by_searches_does() -> None:
    found, _ = cuttable()
    slow = replace(H100, network_link=LinkProfile(1e9, 1e-5), devices_per_host=1)
    asked = StageRequest(cluster=Cluster((DeviceGroup(slow.name, 2, 1),)), profiles={slow.name: slow})
    numbers, start = (2, 4, 8, 16), 16
    searched, estimating = searches_of(found, asked), searches_of(found, asked)
    on_one_each = partial(StageSearch.one_device_each, schedules=("1f1b",))
    slowly = over_microbatches(searched.search, numbers, start, on_one_each)
    quickly = over_microbatches(estimating.search, numbers, start, on_one_each, estimating.estimate)
    assert quickly[0].num_microbatches == slowly[0].num_microbatches < start
    assert quickly[0].step_time_s == pytest.approx(slowly[0].step_time_s)
    assert len(quickly) < len(slowly)
    assert estimating.num_planned < searched.num_planned
