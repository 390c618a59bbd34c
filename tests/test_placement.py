"""Traces, times of layouts, and the simulation of placements with the real scheduler on a fake clock."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import PlacementError
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
from autopar.placement.recorded import Recording

ONE, TWO_STAGES = Layout(), Layout(1, 2)
PREFILL = Options(num_slots=4, max_length=128, chunks=((1, 64),), steps=1)
DECODING = Options(num_slots=4, max_length=256, chunks=((1, 64),), steps=4)


def times(
    layout: Layout, stage_s: float, options: Options = PREFILL, weight_bytes: float = 0.0, token_bytes: float = 0.0
) -> StepTimes:
    stages = (stage_s,) * layout.pipeline
    per_shape = {shape: tuple(each * shape.steps for each in stages) for shape in options.shapes}
    return StepTimes(
        layout=layout, options=options, stage_s=per_shape, weight_bytes=weight_bytes, token_bytes=token_bytes
    )


def spec(name: str, *of: StepTimes, slo: Slo | None = None) -> ModelSpec:
    return ModelSpec(name=name, slo=slo or Slo(latency_s=1e6), times={each.layout: each for each in of})


def prefills(rate: float, seconds: float, *names: str, cv: float = 1.0, seed: int = 1) -> Trace:
    traffic = [Traffic(model=name, rate_per_s=rate, cv=cv, prompt_tokens=64, output_tokens=1) for name in names]
    return synthetic_trace(traffic, seconds, seed)


def at(*arrivals: float, prompt: int = 64, output: int = 1) -> Trace:
    num = len(arrivals)
    columns = (np.zeros(num, np.int32), np.full(num, prompt, np.int32), np.full(num, output, np.int32))
    return Trace(("a",), np.array(arrivals, float), *columns, max(arrivals) + 1)


# -- traces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [1.0, 2.0, 4.0, 8.0])
def test_intervals_have_the_rate_and_the_burstiness(cv: float) -> None:
    trace = prefills(5.0, 40_000.0, "a", cv=cv)
    intervals = np.diff(trace.arrival_s)
    assert trace.num_requests / trace.duration_s == pytest.approx(5.0, rel=0.06)
    assert intervals.std() / intervals.mean() == pytest.approx(cv, rel=0.06)


def test_the_traffic_of_a_model_does_not_depend_on_that_of_others() -> None:
    alone, both = prefills(3.0, 50.0, "a"), prefills(3.0, 50.0, "a", "b")
    np.testing.assert_array_equal(alone.arrival_s, both.arrival_s[both.model == 0])
    assert (np.diff(both.arrival_s) >= 0).all()


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = prefills(3.0, 50.0, "a", "b")
    trace.write(tmp_path / "trace.csv")
    again = Trace.read(tmp_path / "trace.csv")
    np.testing.assert_allclose(again.arrival_s, trace.arrival_s - trace.arrival_s[0])
    names = [[each.models[model] for model in each.model.tolist()] for each in (trace, again)]
    assert names[0] == names[1]
    assert sum(again.rates_per_s().values()) == pytest.approx(6.0, rel=0.3)


def test_requests_are_sorted_and_a_window_begins_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("model,arrival_s,prompt_tokens,output_tokens\nb,12.5,3,1\na,10,5,2\nb,14,7,1\n")
    trace = Trace.read(path, ["a", "b"])
    assert trace.arrival_s.tolist() == [0.0, 2.5, 4.0]
    assert trace.model.tolist() == [0, 1, 1]
    part = trace.within(2.0, 4.0)
    assert (part.arrival_s.tolist(), part.prompt_tokens.tolist(), part.duration_s) == ([0.5], [3], 2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lacks the column 'arrival_s'"),
        ("arrival_s,model,prompt_tokens\n", "lacks the column 'output_tokens'"),
        ("arrival_s,model,prompt_tokens,output_tokens\n", "no requests"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1,a,2,3\nx,a,1,1\n", "line 3: arrival_s"),
        ("arrival_s,model,prompt_tokens,output_tokens\nnan,a,1,1\n", "must be finite"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1e308,a,1,1\n", "at most 1e"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1,a,0,1\n", "at least 1"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1,a,1\n", "two integers"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1,a,1,99999999999\n", "at most 1,000,000,000"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1,c,1,1\n", "the model is 'c'"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(PlacementError, match=said):
        Trace.read(tmp_path / "trace.csv", ["a", "b"])
    with pytest.raises(PlacementError, match="cannot be read"):
        Trace.read(tmp_path / "absent.csv")


def test_invalid_traffic_is_refused() -> None:
    with pytest.raises(PlacementError, match="rate_per_s is 0"):
        Traffic(model="a", rate_per_s=0)
    with pytest.raises(PlacementError, match="prompt_tokens is 0"):
        Traffic(model="a", rate_per_s=1, prompt_tokens=0)
    with pytest.raises(PlacementError, match="given twice"):
        prefills(1.0, 1.0, "a", "a")
    with pytest.raises(PlacementError, match="no request arrives"):
        prefills(1e-6, 1.0, "a")
    with pytest.raises(PlacementError, match="the seed of a trace is -1"):
        prefills(1.0, 1.0, "a", seed=-1)
    with pytest.raises(PlacementError, match="duration"):
        prefills(1.0, math.inf, "a")


# -- times -------------------------------------------------------------------------------------


def test_measured_times_replace_predicted_ones_and_scale_the_others() -> None:
    predicted = times(ONE, 0.010, DECODING)
    corrected = predicted.corrected({Shape(): 0.020, Shape(rows=1, length=64): 0.005})
    assert corrected.seconds(Shape()) == (0.020,)
    assert corrected.seconds(Shape(rows=1, length=64)) == (0.005,)
    assert corrected.seconds(Shape(steps=4)) == pytest.approx((0.040,))  # the mean of twice and half
    with pytest.raises(PlacementError, match="no shape is measured"):
        predicted.corrected({})
    with pytest.raises(PlacementError, match="is measured, but the engine has"):
        predicted.corrected({Shape(width=9): 1.0})
    with pytest.raises(PlacementError, match="positive"):
        predicted.corrected({Shape(): math.nan})


def test_times_need_every_shape_and_stage() -> None:
    with pytest.raises(PlacementError, match="lack the shape"):
        replace(times(ONE, 1.0), stage_s={Shape(): (1.0,)})
    with pytest.raises(PlacementError, match="one positive number for each of the 2 stages"):
        replace(times(TWO_STAGES, 1.0), stage_s=dict.fromkeys(PREFILL.shapes, (1.0,)))


def test_bounds_are_of_the_first_token_the_others_and_the_end() -> None:
    slo = Slo(latency_s=10.0, ttft_s=2.0, tpot_s=1.0)
    assert slo.is_met(2.0, 6.0, 5)
    assert not slo.is_met(2.1, 6.0, 5)
    assert not slo.is_met(1.0, 6.0, 5)  # 1.25 s per token
    assert not Slo(latency_s=5.0).is_met(1.0, 5.5, 5)
    assert slo.deadline_s(5) == 6.0
    with pytest.raises(PlacementError, match="at least one"):
        Slo()


# -- simulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [ONE, TWO_STAGES], ids=["one device", "pipeline"])
@pytest.mark.parametrize("output", [1, 2, 30])
def test_a_request_alone_takes_the_latency_of_its_layout(layout: Layout, output: int) -> None:
    own = times(layout, 0.010, DECODING)
    outcome = simulate(Placement((Group(layout, ("a",)),)), {"a": spec("a", own)}, at(0.0, prompt=150, output=output))
    assert outcome.latency_s[0] == pytest.approx(own.latency_s(150, output))
    assert outcome.ttft_s[0] == pytest.approx(own.latency_s(150, 1))
    assert outcome.goodput == 1.0


def test_decoding_requests_share_iterations_and_stages_take_turns() -> None:
    """Four sequences decode in one iteration on one device. In a pipeline, two halves are in different stages at once."""
    arrivals = at(0.0, 0.0, 0.0, 0.0, prompt=10, output=41)
    for layout, stage_s in ((ONE, 0.010), (TWO_STAGES, 0.005)):
        models = {"a": spec("a", times(layout, stage_s, DECODING))}
        outcome = simulate(Placement((Group(layout, ("a",)),)), models, arrivals)
        assert outcome.latency_s.max() == pytest.approx(0.04 + 0.4, rel=0.1)
        assert outcome.busy[0] < 1


@pytest.mark.parametrize(
    ("num", "within"), [(1_500, 0.15), pytest.param(80_000, 0.02, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_the_waiting_times_are_those_of_md1_queues(num: int, within: float) -> None:
    """AlpaServe's example (section 3.1): two models of 0.4 s at 2 requests/s each, on a device each or on both as stages.

    W = D + rate D_m^2 / (2 (1 - rate D_m)), D the seconds of a request and D_m those of the slowest stage.
    """
    models = {name: spec(name, times(ONE, 0.4), times(TWO_STAGES, 0.2)) for name in "ab"}
    trace = prefills(2.0, num / 4, "a", "b")
    apart = Placement((Group(ONE, ("a",)), Group(ONE, ("b",))))
    shared = Placement((Group(TWO_STAGES, ("a", "b")),))
    found = [simulate(each, models, trace, drops_late=False) for each in (apart, shared)]
    assert [each.mean_latency_s for each in found] == pytest.approx([1.2, 0.8], rel=within)
    assert found[0].busy + found[1].busy == pytest.approx((0.8, 0.8, 0.8), rel=within)


def test_late_requests_are_refused_and_those_before_them_served() -> None:
    models = {"a": spec("a", times(ONE, 1.0), slo=Slo(latency_s=2.5))}
    outcome = simulate(Placement((Group(ONE, ("a",)),)), models, at(0.0, 0.1, 0.2, 0.3, 3.0))
    assert outcome.is_good.tolist() == [True, True, False, False, True]
    assert np.isnan(outcome.latency_s[2:4]).all()
    late = simulate(Placement((Group(ONE, ("a",)),)), models, at(0.0, 0.1, 0.2, 0.3, 3.0), drops_late=False)
    assert late.is_good.tolist() == [True, True, False, False, True]
    assert late.latency_s[3] == pytest.approx(3.7)


def test_requests_go_to_the_replica_with_the_shortest_expected_latency() -> None:
    fast, slow = Layout(2), ONE
    models = {"a": spec("a", times(fast, 0.5), times(slow, 0.9))}
    placement = Placement((Group(slow, ("a",)), Group(fast, ("a",))))
    outcome = simulate(placement, models, at(0.0, 0.0, 0.0))
    assert outcome.latency_s.tolist() == pytest.approx([0.5, 0.9, 1.0])


def test_requests_without_a_replica_or_too_long_are_not_served() -> None:
    models = {name: spec(name, times(ONE, 0.1)) for name in "ab"}
    trace = prefills(2.0, 20.0, "a", "b")
    outcome = simulate(Placement((Group(ONE, ("a",)),)), models, trace)
    assert outcome.attainment() == {"a": 1.0, "b": 0.0}
    assert simulate(Placement((Group(ONE, ("a",)),)), models, at(0.0, prompt=128)).goodput == 0.0


def test_memory_limits_models_and_sequences() -> None:
    own = times(ONE, 0.1, weight_bytes=100.0, token_bytes=1.0)
    models = {name: spec(name, own) for name in "ab"}
    both = Placement((Group(ONE, ("a", "b")),))
    simulate(both, models, at(0.0), budget_bytes=2 * (100 + 128 + 16))
    with pytest.raises(PlacementError, match="group 0 needs 488 B per device for a, b"):
        simulate(both, models, at(0.0), budget_bytes=487)
    with pytest.raises(PlacementError, match="has a model 'c'"):
        simulate(Placement((Group(ONE, ("c",)),)), models, at(0.0))
    with pytest.raises(PlacementError, match="for which it has no times"):
        simulate(Placement((Group(Layout(4), ("a",)),)), models, at(0.0))


def test_a_simulation_ends_when_too_many_requests_are_lost() -> None:
    models = {"a": spec("a", times(ONE, 1.0), slo=Slo(latency_s=1.5))}
    trace = at(*(0.1 * number for number in range(100)))
    placement = Placement((Group(ONE, ("a",)),))
    whole = simulate(placement, models, trace)
    cut = simulate(placement, models, trace, most_lost=5)
    assert (whole.is_whole, cut.is_whole) == (True, False)
    assert cut.num_iterations < whole.num_iterations
    lost = trace.num_requests - whole.num_good
    assert simulate(placement, models, trace, most_lost=lost).num_good == whole.num_good


def test_recorded_times_are_replayed_in_order_and_again() -> None:
    own = replace(times(ONE, 9.0), recording=Recording({Shape(rows=1, length=64): [1.0, 2.0]}))
    outcome = simulate(Placement((Group(ONE, ("a",)),)), {"a": spec("a", own)}, at(0.0, 10.0, 20.0))
    assert outcome.latency_s.tolist() == [1.0, 2.0, 1.0]
    with pytest.raises(PlacementError, match="leave out the recording"):
        replace(times(TWO_STAGES, 9.0), recording=Recording({}))


def test_few_pages_make_sequences_wait() -> None:
    """With pages for one sequence, four requests run one after the other."""
    own = times(ONE, 0.01, DECODING, weight_bytes=0.0, token_bytes=1.0)
    outcomes = [
        simulate(
            Placement((Group(ONE, ("a",)),)), {"a": spec("a", own)}, at(0, 0, 0, 0, prompt=100, output=100), budget
        )
        for budget in (256.0 + 16, 4 * 256.0 + 16)
    ]
    assert outcomes[0].latency_s.max() > 2 * outcomes[1].latency_s.max()


def test_a_sequence_holds_the_pages_of_its_window_only() -> None:
    """A budget for one sequence without a window has room for all four with one."""
    own = times(ONE, 0.01, DECODING, token_bytes=1.0)
    narrow = replace(own, window=32)
    assert (own.pages_of_sequence, narrow.pages_of_sequence) == (16, -(-(32 + DECODING.num_ahead) // 16) + 1)
    assert narrow.least_bytes() < own.least_bytes()
    whole, windowed = (
        simulate(
            Placement((Group(ONE, ("a",)),)), {"a": spec("a", each)}, at(0, 0, 0, 0, prompt=100, output=100), 256.0 + 16
        )
        for each in (own, narrow)
    )
    assert windowed.latency_s.max() < 0.7 * whole.latency_s.max()


# -- prediction --------------------------------------------------------------------------------


@pytest.mark.slow
def test_times_by_two_depths_are_those_of_the_whole_model() -> None:
    """The plans of all twelve layers, as `autopar estimate inference` has them."""
    from autopar.hardware.profile import load
    from autopar.inference.estimate.estimate import PaperInference, inference_on_paper
    from autopar.inference.model.config import DecoderConfig
    from autopar.placement.estimate_times import ServedSpec, estimate_times

    config = DecoderConfig.of(
        {
            "model_type": "llama",
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        }
    )
    case = PaperInference(config=config, prompt=500, output=100, max_length=1024)
    found = inference_on_paper(case, num_devices=2, hardware="h100-sxm", cache=False)
    served = ServedSpec(config=config, options=case.served.options)
    own = estimate_times(served, [Layout(), Layout(2), Layout(2, 2)], load("h100-sxm"), cache=False)
    for whole in found.options:
        assert whole.layout is not None
        assert whole.figures is not None
        mine = own[Layout(whole.mesh.num_devices)]
        for shape in (Shape(), Shape(rows=4, length=64), Shape(rows=1, length=256)):
            theirs = whole.layout.programs[shape].plan.prediction.step_time_s
            assert sum(mine.seconds(shape)) == pytest.approx(theirs, rel=0.05)
        assert mine.weight_bytes == pytest.approx(whole.figures.weight_bytes)
        assert mine.temporary_bytes == pytest.approx(whole.figures.temporary_bytes, rel=0.1)
        assert mine.token_bytes == pytest.approx(whole.layout.page_bytes / 16)
    halves = own[Layout(2, 2)]
    assert max(halves.seconds(Shape())) < 0.65 * sum(own[Layout(2)].seconds(Shape()))
    assert halves.weight_bytes < 0.7 * own[Layout(2)].weight_bytes
    with pytest.raises(PlacementError, match="pipeline of 16 stages"):
        estimate_times(served, [Layout(1, 16)], load("h100-sxm"), cache=False)


@pytest.mark.slow
def test_windows_and_quantized_weights_are_priced() -> None:
    from autopar.hardware.profile import load
    from autopar.inference.model.config import DecoderConfig
    from autopar.placement.estimate_times import ServedSpec, estimate_times

    fields = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096}
    config = DecoderConfig.of({"model_type": "mistral", "sliding_window": 128, **fields})
    options = Options(num_slots=4, max_length=1024)
    found = [
        estimate_times(ServedSpec(config=each, options=options), [ONE], load("h100-sxm"), cache=False)[ONE]
        for each in (config, config.quantized("int8"), config.quantized("int4"))
    ]
    assert [each.window for each in found] == [128] * 3
    assert found[0].pages_of_sequence < 1024 // 16
    whole, bytes_8, bytes_4 = (each.weight_bytes for each in found)
    assert bytes_4 < 0.9 * bytes_8 < 0.9 * 0.6 * whole  # embedding and head have eight bits in both
    assert sum(found[1].seconds(Shape())) < sum(found[0].seconds(Shape()))
