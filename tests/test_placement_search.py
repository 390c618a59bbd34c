"""The search for a placement: against brute force and CP-SAT's bound; changes, files, the command, the picture."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from autopar.cli import main as cli
from autopar.errors import AutoparError, PlacementError
from autopar.hardware.profile import load
from autopar.inference.schedule.requests import Options, Shape
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
from autopar.placement.change import Running, change_bytes, first_devices
from autopar.placement.cost_of_change import cost_of_change
from autopar.placement.draw import placement_svg
from autopar.placement.estimate_serving import estimate_serving
from autopar.placement.evaluate import Evaluator
from autopar.placement.expected import Demand
from autopar.placement.measured_times import read_step_times, write_step_times
from autopar.placement.models_file import read_models
from autopar.placement.rate_bound import largest_rates
from autopar.placement.search import busiest, place
from autopar.placement.tables import change_text, notes, read_placement, render_serving, serving_json
from autopar.system.text_tables import plain_text
from benchmarks.placement.every_placement import every_placement

OPTIONS = Options(num_slots=4, max_length=128, chunks=((1, 64),), steps=1)
ONE, TWO, STAGES, FOUR = Layout(), Layout(2), Layout(1, 2), Layout(4)


def model(
    name: str, seconds: float, bound_s: float, *, overhead: float = 0.1, layouts: tuple[Layout, ...]
) -> ModelSpec:
    """A model of 60 bytes on one device, of which tensor parallelism and stages divide the bytes."""
    times = {}
    for layout in layouts:
        each = seconds / layout.num_devices * (1 + overhead * (layout.num_devices > 1))
        stage_s = dict.fromkeys(OPTIONS.shapes, (each,) * layout.pipeline)
        weights = 60 / layout.num_devices
        times[layout] = StepTimes(layout=layout, options=OPTIONS, stage_s=stage_s, weight_bytes=weights)
    return ModelSpec(name=name, slo=Slo(latency_s=bound_s), times=times)


def trace_of(rates: dict[str, float], seconds: float, cv: float = 4.0, seed: int = 2) -> Trace:
    traffic = [
        Traffic(model=name, rate_per_s=rate, cv=cv, prompt_tokens=64, output_tokens=1) for name, rate in rates.items()
    ]
    return synthetic_trace(traffic, seconds, seed)


# -- the search --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "devices", "budget", "layouts"),
    [
        ({"a": 2.0, "b": 1.0}, 2, 60.0, (ONE, TWO, STAGES)),
        ({"a": 2.0, "b": 1.0}, 4, 60.0, (ONE, TWO, FOUR)),
        ({"a": 1.0, "b": 2.0, "c": 1.0}, 3, 120.0, (ONE, STAGES)),
        pytest.param({"a": 2.0, "b": 1.0, "c": 1.0}, 4, 60.0, (ONE, TWO, STAGES, FOUR), marks=pytest.mark.slow),
        pytest.param({"a": 2.0, "b": 1.0, "c": 1.0, "d": 3.0}, 4, 120.0, (ONE, TWO, STAGES), marks=pytest.mark.slow),
    ],
)
def test_the_search_finds_what_brute_force_finds(
    rates: dict[str, float], devices: int, budget: float, layouts: tuple[Layout, ...]
) -> None:
    models = [model(name, 0.2, 0.8, layouts=layouts) for name in rates]
    trace = trace_of(rates, 20.0)
    found = place(models, trace, devices, budget)
    named = {each.name: each for each in models}
    evaluator = Evaluator(named, trace, budget)
    every = list(every_placement(named, layouts, devices, budget))
    every_model = [each for each in every if {name for group in each.groups for name in group.models} == set(named)]
    best = max((evaluator.score(each).num_good, -each.num_devices) for each in every_model)
    assert (found.outcome.num_good, -found.placement.num_devices) == best
    assert len(every) == len(set(every)) > 10


def test_the_parts_of_a_placement_are_simulated_as_the_whole() -> None:
    layouts = (ONE, TWO)
    models = {name: model(name, 0.2, 0.8, layouts=layouts) for name in "abc"}
    trace = trace_of({"a": 3.0, "b": 1.0, "c": 2.0}, 30.0)
    placement = Placement((Group(TWO, ("b", "c")), Group(ONE, ("a",)), Group(ONE, ("b",))))
    whole, evaluator = simulate(placement, models, trace), Evaluator(models, trace, 1e9)
    score = evaluator.score(placement)
    assert score.num_good == whole.num_good
    assert score.busy == pytest.approx(whole.busy, rel=0.05)
    simulated = evaluator.num_iterations
    evaluator.score(Placement((Group(ONE, ("a",)), Group(TWO, ("b", "c")), Group(ONE, ("b",)))))
    assert evaluator.num_iterations == simulated > 0


def test_bursts_are_multiplexed_by_sharing_devices_and_steady_traffic_with_overhead_is_not() -> None:
    """AlpaServe's point: with memory for one model per device, bursts of one use the devices of both."""
    rates = {"a": 1.5, "b": 1.5}
    bursty = place([model(n, 0.2, 0.7, layouts=(ONE, TWO)) for n in rates], trace_of(rates, 60.0, cv=6.0), 2, 60.0)
    assert bursty.placement.groups == (Group(TWO, ("a", "b")),)
    apart = Placement((Group(ONE, ("a",)), Group(ONE, ("b",))))
    steady = [model(n, 0.2, 0.7, overhead=1.0, layouts=(ONE, TWO)) for n in rates]
    calm = place(steady, trace_of(rates, 60.0, cv=1.0), 2, 60.0)
    assert calm.placement == apart


def test_equally_good_placements_use_fewer_devices_then_load_fewer_bytes() -> None:
    models = [model(name, 0.1, 2.0, layouts=(ONE,)) for name in "ab"]
    trace = trace_of({"a": 0.2, "b": 0.2}, 40.0, cv=1.0)
    found = place(models, trace, 4, 120.0)
    assert found.outcome.goodput == 1.0
    assert found.placement == Placement((Group(ONE, ("a", "b")),))
    assert (found.load_bytes, found.firsts) == (120.0, {0: 0})
    again = place(models, trace, 4, 120.0, current=found.running)
    assert (again.placement, again.load_bytes) == (found.placement, 0.0)


def test_the_rate_bound_is_above_every_placement_and_is_reached() -> None:
    layouts = (ONE, TWO)
    models = {name: model(name, 0.2, 0.8, layouts=layouts) for name in "abc"}
    demand = Demand(models, trace_of({"a": 6.0, "b": 2.0, "c": 3.0}, 60.0))
    solved = largest_rates(models, demand, 3, 60.0)
    assert solved.is_optimal
    assert solved.rate_per_s == solved.bound_per_s > 10
    every = every_placement(models, layouts, 3, 60.0)
    rates = {each: largest_rates(models, demand, 3, 60.0, only=each).rate_per_s for each in every}
    assert max(rates.values()) == pytest.approx(solved.rate_per_s, abs=0.01)
    assert rates[solved.placement] == pytest.approx(solved.rate_per_s, abs=0.01)


def test_a_placement_that_cannot_be_found_is_refused() -> None:
    models, trace = [model("a", 0.2, 0.8, layouts=(TWO,))], trace_of({"a": 1.0}, 20.0)
    with pytest.raises(PlacementError, match="fits on no group of at most 1 device"):
        place(models, trace, 1, 60.0)
    with pytest.raises(PlacementError, match="fits on no group of at most 4 devices: it takes 3e-08 GB"):
        place(models, trace, 4, 20.0)
    with pytest.raises(PlacementError, match="number of devices is 0"):
        place(models, trace, 0, 60.0)
    with pytest.raises(PlacementError, match="requests for 'b'"):
        place(models, trace_of({"b": 1.0}, 20.0), 4, 60.0)
    with pytest.raises(PlacementError, match="max_requests is 0"):
        place(models, trace, 4, 60.0, max_requests=0)
    for name in ("", " ", "a\x1b[31m", "a\nb"):
        with pytest.raises(PlacementError, match="cannot be the name of a model"):
            model(name, 0.2, 0.8, layouts=(ONE,))
    with pytest.raises(PlacementError, match="each with its own name"):
        place(models * 2, trace, 4, 60.0)


def test_the_choice_is_by_the_whole_trace_and_no_worse_than_the_largest_rates_and_what_runs() -> None:
    """In the burst that is searched with, all requests are for `a`; most of the others are for `b`."""
    names, burst, rest = ("a", "b"), np.linspace(0.0, 2.0, 30), np.linspace(5.0, 45.0, 110)
    arrival = np.concatenate([burst, rest])
    columns = (np.repeat(np.array([0, 1], np.int32), [30, 110]), np.full(140, 64, np.int32), np.ones(140, np.int32))
    trace = Trace(names, arrival, *columns, duration_s=46.0)
    models = [model(name, 0.3, 0.6, layouts=(ONE, TWO)) for name in names]
    named = {each.name: each for each in models}
    for runs in (Placement((Group(ONE, ("a",)), Group(ONE, ("b",)), Group(ONE, ("b",)))), None):
        current = None if runs is None else Running.of(runs)
        found = place(models, trace, 3, 60.0, current=current, max_requests=30)
        rates = largest_rates(named, Demand(named, busiest(trace, 30)), 3, 60.0).placement
        others = [each for each in (runs, rates) if each is not None]
        assert found.outcome.num_good >= max(simulate(each, named, trace, 60.0).num_good for each in others)
    assert busiest(trace, 30).model.sum() == 0


def test_the_busiest_part_has_the_most_requests_per_second() -> None:
    trace = trace_of({"a": 5.0}, 100.0, cv=6.0)
    part = busiest(trace, 50)
    assert part.num_requests == 50
    assert part.num_requests / part.duration_s > 2 * trace.num_requests / trace.duration_s
    assert busiest(trace, 10**6) is trace


def test_a_model_without_requests_has_a_replica_and_impossible_bounds_are_named() -> None:
    models = [model(name, 0.2, 0.8, layouts=(ONE,)) for name in "ab"] + [model("slow", 2.0, 0.5, layouts=(ONE,))]
    trace = trace_of({"a": 0.5, "slow": 0.5}, 20.0, cv=1.0)
    found = estimate_serving(models, trace, load("h100-sxm"), 1, memory_budget_bytes=400.0, neighbours=False)
    assert found.found.placement == Placement((Group(ONE, ("a", "b", "slow")),))
    assert notes(found) == ["slow: no layout meets the bounds, even for a request that is alone."]
    assert "slow: no layout meets the bounds" in plain_text(lambda console: render_serving(found, console))


# -- changes -----------------------------------------------------------------------------------


def test_groups_that_stay_keep_their_devices_and_weights() -> None:
    models = {name: model(name, 0.2, 0.8, layouts=(ONE, TWO)) for name in "abc"}
    current = Placement((Group(TWO, ("a", "b")), Group(ONE, ("c",))))
    assert first_devices(current.groups) == {0: 0, 1: 2}
    new = Placement((Group(TWO, ("c",)), Group(TWO, ("a", "c"))))
    assert change_bytes(new, Running.of(current), models, 4) == (60.0 + 60.0, {1: 0, 0: 2})
    assert change_bytes(new, None, models, 4) == (180.0, {0: 0, 1: 2})
    assert change_bytes(current, Running.of(current), models, 4)[0] == 0.0


def test_a_group_in_the_way_of_a_larger_one_moves() -> None:
    models = {name: model(name, 0.2, 0.8, layouts=(ONE, TWO)) for name in "ab"}
    current = Placement((Group(ONE, ("a",)), Group(ONE, ("b",)), Group(ONE, ("a",))))
    new = Placement((Group(TWO, ("b",)), Group(ONE, ("a",))))
    assert change_bytes(new, Running.of(current), models, 3) == (60.0, {0: 0, 1: 2})
    crowded = Placement((Group(TWO, ("b",)), Group(ONE, ("b",))))
    moved = Running(current, {0: 2, 1: 1, 2: 0})
    assert change_bytes(new, moved, models, 3) == (60.0, {0: 0, 1: 2})
    assert change_bytes(crowded, Running.of(current), models, 3) == (120.0, {0: 0, 1: 2})


def test_groups_that_are_kept_change_their_models_only() -> None:
    layouts = (ONE, TWO)
    models = [model(name, 0.2, 0.8, layouts=layouts) for name in "ab"]
    current = Running.of(Placement((Group(ONE, ("a",)), Group(ONE, ("a",)), Group(ONE, ("b",)))))
    trace = trace_of({"a": 0.5, "b": 6.0}, 30.0)
    found = place(models, trace, 3, 60.0, current=current, keeps_groups=True)
    assert {group.layout for group in found.placement.groups} == {ONE}
    assert sorted(group.models for group in found.placement.groups) == [("a",), ("b",), ("b",)]
    assert found.load_bytes == 60.0
    at = {first: found.placement.groups[number].models for number, first in found.firsts.items()}
    assert at[2] == ("b",)  # it stays where it was
    swapped = Placement((Group(ONE, ("b",)), Group(TWO, ("a",))))
    running = Running(Placement((Group(TWO, ("b",)), Group(ONE, ()), Group(ONE, ("a",)))), {0: 0, 1: 2, 2: 3})
    named = {each.name: each for each in models}
    assert change_bytes(swapped, running, named, 4, keeps_groups=True)[1] == {0: 2, 1: 0}


def test_a_change_costs_the_requests_of_groups_that_stop_and_pays_by_what_it_brings() -> None:
    models = [model(name, 0.2, 0.8, layouts=(ONE,)) for name in "ab"]
    named = {each.name: each for each in models}
    current = Running.of(Placement((Group(ONE, ("a",)), Group(ONE, ("a",)), Group(ONE, ("b",)))))
    trace = trace_of({"a": 0.5, "b": 6.0}, 30.0)
    found = place(models, trace, 3, 60.0, current=current)
    cost = cost_of_change(found, current, named, 60.0, load_bytes_per_s=30.0)
    before = simulate(current.placement, named, trace, 60.0)
    assert (cost.goodput_before, cost.seconds) == (before.goodput, 2.0)
    good = int(before.is_good[trace.model == 0].sum())
    assert cost.lost == pytest.approx(good / 2 / 30.0 * 2.0)  # one of two replicas of `a` stops
    assert cost.pays_after_s == pytest.approx(cost.lost / cost.gain_per_s)
    assert "has paid after" in change_text(cost)
    same = place(models, trace, 3, 60.0, current=found.running)
    nothing = cost_of_change(same, found.running, named, 60.0, load_bytes_per_s=30.0)
    assert (nothing.seconds, nothing.lost, nothing.pays_after_s) == (0.0, 0.0, math.inf)
    roomy = cost_of_change(found, Running.of(Placement(())), named, 60.0, load_bytes_per_s=30.0)
    assert roomy.lost == 0.0


# -- files and the command ---------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
MODELS = """
[chat]
config = "config.json"
slots = 4
max_length = 256
ttft_s = 0.05
tpot_s = 0.01
traffic = { rate_per_s = 4, cv = 2, prompt_tokens = 100, output_tokens = 20 }

[code]
config = "config.json"
slots = 4
max_length = 256
latency_s = 0.5
measured = "steps.json"
traffic = { rate_per_s = 2, prompt_tokens = 50, output_tokens = 10 }
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "models.toml").write_text(MODELS)
    write_step_times(tmp_path / "steps.json", {Shape(): 0.001, Shape(rows=1, length=256): 0.002})
    return tmp_path


def test_an_estimate_is_printed_drawn_and_written(tmp_path: Path) -> None:
    models = [model(name, 0.1, 0.5, layouts=(ONE, TWO)) for name in ("chat", "<code>")]
    trace = trace_of({"chat": 6.0, "<code>": 2.0}, 20.0)
    found = estimate_serving(models, trace, load("h100-sxm"), 2, memory_budget_bytes=100.0)
    text = plain_text(lambda console: render_serving(found, console))
    assert "2 models on 2 h100-sxm devices:" in text
    assert "One device more or less" in text
    assert found.fewer is not None
    assert found.more is not None
    assert found.fewer.outcome.goodput <= found.found.outcome.goodput <= found.more.outcome.goodput
    drawn = ET.fromstring(placement_svg(found))
    kinds = [each.get("class") for each in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert (kinds.count("device"), kinds.count("group")) == (2, len(found.found.placement.groups))
    content = json.loads(json.dumps(serving_json(found)))
    (tmp_path / "placement.json").write_text(json.dumps(content))
    assert read_placement(tmp_path / "placement.json") == found.found.running
    content["groups"][0]["first_device"] = -1
    (tmp_path / "placement.json").write_text(json.dumps(content))
    with pytest.raises(PlacementError, match="is no placement"):
        read_placement(tmp_path / "placement.json")
    assert content["neighbours"]["3"]["goodput"] == found.more.outcome.goodput
    alone = estimate_serving(models, trace, load("h100-sxm"), 1, memory_budget_bytes=200.0, neighbours=False)
    assert (alone.fewer, alone.more) == (None, None)


@pytest.mark.slow
def test_the_command_places_prints_draws_and_goes_on(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--models", str(files / "models.toml"), "--hardware", "h100-sxm", "--devices", "2", "--duration", "10"]
    saved, picture = files / "placement.json", files / "placement.svg"
    assert cli.main(["estimate", "serving", *common, "-o", str(saved), "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "2 models on 2 h100-sxm devices: 100.0 % of requests within their bounds on 1 of them, predicted" in text
    assert "One device more or less" in text
    assert read_placement(saved).placement == Placement((Group(ONE, ("chat", "code")),))
    drawn = ET.fromstring(picture.read_text())
    kinds = [each.get("class") for each in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert (kinds.count("device"), kinds.count("group")) == (2, 1)
    assert cli.main(["estimate", "serving", *common, "--current", str(saved), "--json", "--no-neighbours"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["load_bytes"], content["goodput"]) == (0.0, 1.0)
    assert content["change"]["goodput_before"] == 1.0
    assert content["change"]["pays_after_s"] is None  # nothing to gain
    assert cli.main(["estimate", "serving", *common, "--keep-groups"]) == 2
    assert "give `--current FILE` too" in capsys.readouterr().err
    assert content["groups"] == [{"first_device": 0, "tensor": 1, "pipeline": 1, "models": ["chat", "code"]}]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("slots = 4", "slot = 4", "'slot' is no key: the keys are config"),
        ("slots = 4", 'slots = "4"', "slots is '4', and must be an integer"),
        ("slots = 4", 'quantize = "int3"', "int3"),
        ("slots = 4", "slots = 0", "slots is 0: give at least 1"),
        ("max_length = 256", "max_length = 9999", "the model has 512 positions"),
        ("output_tokens = 20", "output_tokens = 200", "100 \\+ 200 tokens, but max_length is 256"),
        ("rate_per_s = 4, ", "", "lacks `rate_per_s`"),
        ("rate_per_s = 4, ", "rate_per_s = -4, ", "rate_per_s is -4"),
        ("ttft_s = 0.05\ntpot_s = 0.01\n", "", "has no latency bound"),
        ('config = "config.json"\nslots = 4\nmax_length = 256\nttft', "ttft", "lacks `config`"),
        ("[chat]", "[chat", "is not valid TOML"),
        ("[chat]", "seed = 1\n[chat]", "outside of any table"),
    ],
)
def test_an_invalid_file_of_models_is_refused(files: Path, old: str, new: str, said: str) -> None:
    (files / "models.toml").write_text(MODELS.replace(old, new, 1))
    with pytest.raises(AutoparError, match=said):
        read_models(files / "models.toml")


def test_damaged_files_are_refused(files: Path) -> None:
    layout, seconds = read_step_times(files / "steps.json")
    assert (layout, seconds[Shape()]) == (ONE, 0.001)
    for content in ("{}", "[]", "x", '{"format": "autopar-step-times", "version": 2}'):
        (files / "steps.json").write_text(content)
        with pytest.raises(PlacementError, match="has no step times"):
            read_step_times(files / "steps.json")
        with pytest.raises(PlacementError, match="is no placement"):
            read_placement(files / "steps.json")
    with pytest.raises(PlacementError, match="cannot be read"):
        read_models(files / "absent.toml")
