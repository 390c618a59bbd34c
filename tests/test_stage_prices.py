"""Prices of stages: from few plans, compared with planned stages."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost.kernel_time import op_seconds
from autopar.hardware.profile import LinkProfile, load
from autopar.ir.mesh import MeshShape
from autopar.pipeline.cut.deferred_reductions import deferrable
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.cluster_layers import Clustering, repeated_layers
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search import quick_plan
from autopar.pipeline.search.estimates import StageFigures
from autopar.pipeline.search.layer_shares import _Residuals
from autopar.pipeline.search.microbatch_search import over_microbatches
from autopar.pipeline.search.plan_stages import searches_of
from autopar.pipeline.search.quick_plan import Form, QuickPlanner, Way
from autopar.pipeline.search.request import StageRequest
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
    slow = replace(H100, host_link=replace(H100.host_link, bytes_per_s=H100.host_link.bytes_per_s / 30))
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
    """Between programs of their own, a gradient's reduction over devices waits where the executor can defer it."""
    costs = prices()
    first, _ = middle(costs)
    program = costs.layers.run_of(first, first).program.forms[-1]
    planner, form = QuickPlanner(Ilp()), Form(program)
    slowly = {dtype: rate / 1e4 for dtype, rate in H100.peak_flops_per_s.items()}  # so that work is worth splitting
    slow = replace(H100, network_link=LinkProfile(1e8, 1e-5), devices_per_host=1, peak_flops_per_s=slowly)

    def pending(may: bool) -> set[int]:
        """The sums that stay pending on four hosts of one device."""
        made = planner.planned_in(Way(MeshShape(("data",), (4,)), 0, pending=may), (form,), slow)
        f, choices = made.formulation, made.solution.choices
        carried = [v for node in f.graph.nodes if node.primitive == "enter_carry" for v in node.results]
        known = {v: f.value_made[v][1][choices[f.value_made[v][0]]] for v in carried if v in f.value_made}
        assert known
        return {v for v, sharding in known.items() if sharding.unreduced}

    assert pending(True)
    assert pending(False) <= deferrable(form.program.trace)


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
            planned.forward_s + planned.backward_s + planned.weight_s, rel=0.15
        )
        assert guess.state_bytes == pytest.approx(planned.state_bytes, rel=0.2)  # another number splits other state


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


def odd_layers(params: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Four layers that examples are worth splitting for, and whose kernels two devices cannot share evenly."""

    def loss(params: list[jax.Array]) -> jax.Array:
        x = batch
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.parametrize("waits", [True, False], ids=["planned unreduced", "planned reduced"])
def test_a_reduction_that_waits_is_priced_once_a_step(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:
        monkeypatch.setattr(quick_plan, "deferrable", lambda trace: set())
    kernels = [jax.ShapeDtypeStruct((255, 255), "float32")] * 4
    args = (kernels, jax.ShapeDtypeStruct((2**18, 255), "float32"))
    layers = Cuttable.of(program_of(odd_layers, args, carry=None, donate=None)).layers([0, 4], 8)
    stage = layers.run_of(0, 0)
    form = Form(stage.program.forms[-1])
    way = Way(MeshShape(("data",), (2,)), 0)
    candidate = QuickPlanner(Ilp()).planned_in(way, (form,), H100)
    layout = Layout(candidate.program.trace, stage.inputs)
    in_pieces, in_one = StageFigures(candidate, layout), StageFigures(candidate, layout, separate=False)
    assert len(in_pieces.pieces.deferred) == len(layout.carries) > 0 and not in_one.pieces.deferred
    reductions = [op for op in candidate.parts.device.ops if op.collective == "all-reduce" and op.payload_bytes > 1e5]
    seconds = sum(op_seconds(op, candidate.formulation.mesh, H100) for op in reductions)
    assert sum(op.payload_bytes for op in reductions) == pytest.approx(len(layout.carries) * 4 * 255**2)
    copied = sum(in_pieces.pieces.copied.values())  # the batch in microbatches: a view in one program
    assert copied == 2**18 * 255 * 4 / 2 and not in_one.pieces.copied
    copying_s = 2 * copied / H100.memory_bytes_per_s
    if waits:  # all outside the loop already
        assert in_pieces.update_s == pytest.approx(in_one.update_s + copying_s, rel=0.1)
        assert in_pieces.backward_s == pytest.approx(in_one.backward_s)
    else:
        assert in_one.backward_s > in_pieces.backward_s
        assert in_pieces.update_s > in_one.update_s + copying_s + 0.5 * seconds
    assert in_pieces.update_s > 0.9 * seconds
    assert in_pieces.state_bytes == pytest.approx(in_one.state_bytes + copied)  # one sum on each device


def test_passes_on_a_cpu_are_priced_in_their_measured_ratio() -> None:
    """Measured in stages of an MLP-Mixer on 8 virtual devices: the forward pass takes 0.4 to 0.5 times as long as the
    backward pass. With tanh counted at hundreds of operations it was priced at 2.5 times."""

    def blocks(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> Any:
        def loss(params: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
            h = x
            for wide, narrow in params:
                h = h + jax.nn.gelu(h @ wide) @ narrow
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    def kernel(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32")

    args = ([(kernel(128, 256), kernel(256, 128))] * 4, kernel(4096, 128))
    cuttable = Cuttable.of(program_of(blocks, args, carry=None, donate=None))
    layers = cuttable.layers([0, len(cuttable.chain.flops) // 2], 4)
    profile = load("cpu-host")
    costs = StageCosts(layers, {profile.name: profile}, range(2))
    for devices in (1, 4):
        cost = costs.cost(0, 0, SubmeshShape(profile.name, 1, devices))
        assert 0.3 < cost.forward_s / cost.backward_s < 0.8


@pytest.mark.parametrize("seed", range(5))
def test_residuals_that_runs_receive_are_those_of_each_run(seed: int) -> None:
    draw = np.random.default_rng(seed)
    layers, count = 12, 40
    made_by, read_by = draw.integers(0, layers, (2, count))
    read_before = np.array([draw.integers(-1, layer) for layer in read_by])
    none = np.zeros(layers + 1)
    held = _Residuals(none, none, none, none, none, made_by, read_by, read_before, draw.random(count), 0.0)
    borders = np.array([0, *sorted(draw.choice(np.arange(1, layers), 4, replace=False)), layers])
    table = held.received(borders[:-1], borders[1:])
    for first, start in enumerate(borders[:-1]):
        for last in range(first, len(borders) - 1):
            end = borders[last + 1]
            here = (read_by >= start) & (read_by < end)  # in the run, made before it, and not read in it before
            here &= (made_by < start) & (read_before < start)
            assert table[first, last] == pytest.approx(held.sizes[here].sum(), abs=1e-12)


def test_a_table_has_the_costs_of_all_runs() -> None:
    layers, count = prices().layers, len(prices().keys)
    for together in (None, (0,) * count):
        costs = StageCosts(layers, {H100.name: H100}, prices().keys, together=together, splits_backward=True)
        for shape in (SubmeshShape(H100.name, 1, 1, option=1), SubmeshShape(H100.name, 1, 2)):
            borders = (0, 2, 3, count)
            tables = costs.table(borders, shape), costs.bounds(borders, shape)
            for first in range(3):
                for last in range(first, 3):
                    run = borders[first], borders[last + 1] - 1, shape
                    for table, cost in zip(tables, (costs.cost(*run), costs.bound(*run)), strict=True):
                        for field in fields(StageCost):
                            entry = np.broadcast_to(getattr(table, field.name), (3, 3))[first, last]
                            assert entry == pytest.approx(getattr(cost, field.name), rel=1e-9, abs=1e-15)
