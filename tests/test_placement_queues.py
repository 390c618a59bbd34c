"""Queues as a guide of the search for a placement, and the search in its corner cases."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.inference.schedule.requests import Options
from autopar.placement import (
    Group,
    Layout,
    ModelSpec,
    Placement,
    Slo,
    StepTimes,
    Trace,
    Traffic,
    simulate,
    synthetic_trace,
)
from autopar.placement.change import Running
from autopar.placement.queues import Queues
from autopar.placement.search import place

ONE, TWO = Layout(), Layout(2)
OPTIONS = Options(num_slots=4, max_length=128, chunks=((1, 64),), steps=1)


def model(name: str, slo: Slo, seconds: float = 0.2) -> ModelSpec:
    """A model of 60 bytes and `seconds` for each iteration, on one device or half of that on two."""
    times = {
        layout: StepTimes(
            layout=layout,
            options=OPTIONS,
            stage_s=dict.fromkeys(OPTIONS.shapes, (seconds / layout.num_devices,)),
            weight_bytes=60 / layout.num_devices,
        )
        for layout in (ONE, TWO)
    }
    return ModelSpec(name=name, slo=slo, times=times)


def trace_at(arrivals: list[float], names: tuple[str, ...] = ("a",), output: int = 1) -> Trace:
    """Requests at these times, for the models in turns."""
    num = len(arrivals)
    models = np.arange(num, dtype=np.int32) % len(names)
    tokens = np.full(num, 64, np.int32)
    return Trace(names, np.array(arrivals), models, tokens, np.full(num, output, np.int32), 60.0)


def on(*models: str, layout: Layout = ONE) -> Placement:
    return Placement((Group(layout, models),))


def test_a_queue_serves_in_order_and_refuses_what_is_late() -> None:
    """Four requests at once, 0.2 s each, and 0.5 s of time: two are served, one runs in vain or is refused, one is refused."""
    queues = Queues({"a": model("a", Slo(latency_s=0.5))}, trace_at([0.0, 0.0, 0.0, 0.0, 2.0]))
    good, left = queues.goodput([on("a")])[0].tolist()
    assert good == 3.0
    assert left == pytest.approx((1 - 0.4) + (1 - 0.8) + (1 - 0.4))
    assert queues.goodput([on("a", layout=TWO)])[0, 0] == 5.0
    assert queues.goodput([on("b"), Placement(())])[:, 0].tolist() == [0.0, 0.0]
    assert queues.goodput([]).shape == (0, 2)


def test_steps_of_other_models_count_for_the_time_per_token() -> None:
    """Two models that decode on one device have each token in 0.4 s, and alone in 0.2 s."""
    names = ("a", "b")
    trace = trace_at([0.0, 1.0], names, output=20)
    queues = Queues({name: model(name, Slo(tpot_s=0.3)) for name in names}, trace)
    apart = Placement((Group(ONE, ("a",)), Group(ONE, ("b",))))
    assert queues.goodput([on("a", "b"), apart])[:, 0].tolist() == [1.0, 2.0]


def test_a_request_without_a_replica_is_lost_whatever_its_bounds() -> None:
    trace = trace_at([0.0, 1.0], ("a", "b"), output=2)
    queues = Queues({name: model(name, Slo(tpot_s=9.0)) for name in "ab"}, trace)
    assert queues.goodput([on("a")])[0, 0] == 1.0
    long = Trace(("a",), np.zeros(1), np.zeros(1, np.int32), np.full(1, 500, np.int32), np.ones(1, np.int32), 1.0)
    assert Queues({"a": model("a", Slo(latency_s=9.0))}, long).goodput([on("a")])[0, 0] == 0.0


def test_placements_are_estimated_together_as_each_alone_and_near_their_simulations() -> None:
    names, slo = ("a", "b", "c"), Slo(latency_s=0.9)
    models = {name: model(name, slo) for name in names}
    traffic = [Traffic(model=name, rate_per_s=3.0, cv=3.0, prompt_tokens=64, output_tokens=1) for name in names]
    trace = synthetic_trace(traffic, 60.0, 3)
    placements = [
        Placement((Group(ONE, ("a",)), Group(ONE, ("b",)), Group(ONE, ("c",)))),
        Placement((Group(TWO, ("a", "b")), Group(ONE, ("c",)))),
        Placement((Group(TWO, ("a", "b")), Group(TWO, ("b", "c")))),
        on("a", "b", layout=TWO),
    ]
    queues = Queues(models, trace)
    together = queues.goodput(placements)
    assert np.array_equal(together, np.concatenate([queues.goodput([each]) for each in placements]))
    simulated = [simulate(each, models, trace).num_good for each in placements]
    assert np.argsort(together[:, 0]).tolist() == np.argsort(simulated).tolist()
    assert np.abs(together[:, 0] - simulated).max() < 0.15 * trace.num_requests


# -- corner cases of the search ----------------------------------------------------------------


def test_one_model_on_one_device_and_one_request() -> None:
    models = [model("a", Slo(latency_s=0.9))]
    found = place(models, trace_at([0.0]), 1, 60.0)
    assert (found.placement, found.outcome.num_good, found.load_bytes) == (on("a"), 1, 60.0)
    assert place(models, trace_at([0.0]), 4, 60.0).placement.num_devices == 1


def test_models_without_requests_have_replicas_and_more_models_than_fit_leave_some_out() -> None:
    models = [model(name, Slo(latency_s=0.9)) for name in "abcde"]
    trace = trace_at([0.0, 1.0, 2.0], ("a",))
    roomy = place(models, trace, 3, 120.0)
    assert {name for group in roomy.placement.groups for name in group.models} == set("abcde")
    full = place(models, trace_at([float(n) for n in range(10)], tuple("abcde")), 2, 60.0)
    assert sum(len(group.models) for group in full.placement.groups) == 2
    assert full.outcome.num_good == 4


@pytest.mark.parametrize("effort", [1, 1000])
def test_little_effort_finds_a_placement_and_what_runs_is_never_left_for_a_worse_one(effort: int) -> None:
    models = [model(name, Slo(latency_s=0.9)) for name in "ab"]
    named = {each.name: each for each in models}
    traffic = [Traffic(model=name, rate_per_s=4.0, cv=3.0, prompt_tokens=64, output_tokens=1) for name in "ab"]
    trace = synthetic_trace(traffic, 60.0, 1)
    assert len(place(models, trace, 4, 60.0, effort=effort, max_requests=100).placement.groups) > 0
    runs = Placement((Group(ONE, ("a",)), Group(ONE, ("b",)), Group(ONE, ("b",))))
    found = place(models, trace, 4, 60.0, current=Running.of(runs), keeps_groups=True, effort=effort, max_requests=100)
    assert [group.layout for group in found.placement.groups] == [ONE] * len(found.placement.groups)
    assert found.outcome.num_good >= simulate(runs, named, trace, 60.0).num_good


def test_a_device_that_brings_nothing_is_not_used() -> None:
    """Two models share a device in turns; the search starts from one device for each."""
    models = [model(name, Slo(latency_s=2.0), 0.1) for name in "abc"]
    trace = trace_at([float(n) for n in range(30)], tuple("abc"))
    found = place(models, trace, 8, 180.0)
    assert (found.outcome.goodput, found.placement.num_devices) == (1.0, 1)
