"""The report of a run compared with its plan: timing, contents, and no cost per call."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import autopar
from autopar.api import measure_step
from autopar.api.call_clock import REMEMBERED, Calls
from autopar.api.measure_step import model_flops, report_on
from autopar.api.step_report import StepReport
from autopar.errors import StepSignatureError
from autopar.hardware.profile import load
from autopar.transforms.program import program_of

# -- timing -----------------------------------------------------------------------------------


class Clock:
    """Tells the times that it is given, then stays at the last."""

    def __init__(self, times: Iterable[float]) -> None:
        self.times = list(times)

    def __call__(self) -> float:
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


def timed(*times: float) -> Calls:
    calls = Calls(Clock(times))
    for _ in times[:-2]:
        calls.note()
    return calls


def nothing() -> None:
    """The devices have done all."""


def test_the_time_of_a_step_is_the_median_from_call_to_call() -> None:
    calls = timed(0.0, 1.0, 2.0, 12.0, 13.0, 14.0, 14.0, 14.1)  # once, the host did something else
    assert calls.num_steps == 5
    assert calls.step_time_s(nothing) == (1.0, False)


def test_where_the_host_was_ahead_all_time_counts() -> None:
    """Ten calls in a hundredth of a second, and then ten seconds until the devices are done."""
    calls = timed(*(0.001 * n for n in range(10)), 0.01, 10.0)
    step_time_s, host_was_ahead = calls.step_time_s(nothing)
    assert host_was_ahead
    assert step_time_s == pytest.approx(1.0)


def test_what_comes_after_a_new_start_alone_counts() -> None:
    calls = timed(0.0, 1.0, 2.0, 3.0, 3.0)
    calls.restart()
    assert calls.num_steps == 0
    calls.note()
    assert calls.num_steps == 0


def test_a_call_unlike_the_others_does_not_count() -> None:
    """Three steps of a second; after it, where no call is compared with one before, four of two seconds."""
    calls = Calls(Clock([0.0, 1.0, 2.0, 3.0, 3.0, 3.0, 50.0, 52.0, 54.0, 56.0, 58.0]))
    for _ in range(4):
        calls.note()
    calls.interrupt(nothing)
    assert calls.num_steps == 3 and calls.step_time_s(nothing) == (1.0, False)
    calls.note()
    calls.note()  # fewer steps since: those before still tell more
    assert calls.num_steps == 3 and calls.step_time_s(nothing) == (1.0, False)
    for _ in range(3):
        calls.note()
    assert calls.num_steps == 4 and calls.step_time_s(nothing) == (2.0, False)
    calls.restart()
    calls.interrupt(nothing)
    assert calls.num_steps == 0


def test_only_the_last_calls_are_remembered() -> None:
    calls = Calls(Clock(float(n) for n in range(1000)))
    for _ in range(900):
        calls.note()
    assert calls.num_steps == REMEMBERED - 1


# -- what is told -----------------------------------------------------------------------------


def planned(**options: Any) -> tuple[autopar.Plan, Any]:
    program = programs.mlp(batch=32, width=256, num_layers=4)
    options = {"mesh": "8", "hardware": "h100-sxm"} | options
    traced = program_of(program.step, program.abstract_args(), carry=None, donate=None)
    return autopar.plan(program.step, *program.abstract_args(), **options), traced.as_traced.graph


def told(factor: float = 1.0, **changes: Any) -> StepReport:
    plan, graph = planned()
    figures: dict[str, Any] = {
        "device_kind": "NVIDIA H100 80GB HBM3",
        "num_steps": 20,
        "step_time_s": factor * plan.prediction.step_time_s,
        "host_was_ahead": False,
        "peak_bytes": plan.prediction.peak_bytes,
        "memory_from": "devices",
    }
    return report_on(plan, graph, load("h100-sxm"), **(figures | changes))


def test_what_is_as_predicted_leaves_nothing_to_do() -> None:
    report = told(1.1)
    assert report.holds
    assert report.off == pytest.approx(1 / 1.1 - 1)
    assert report.memory_off == 0
    assert report.suspects == ()
    assert "as predicted" in str(report)
    assert "not as predicted" not in str(report)


@pytest.mark.parametrize(("factor", "words"), [(1.7, "slower"), (0.5, "faster")])
def test_what_is_far_off_names_the_figures_to_check(factor: float, words: str) -> None:
    report = told(factor)
    assert not report.holds
    kernels = next(one for one in report.suspects if one.part == "kernels")
    assert (kernels.factor > 1) == (factor > 1)
    assert "hbm_bytes_per_s" in kernels.check or "peak_flops_per_s" in kernels.check
    (advice,) = report.advice
    assert words in advice
    assert "autopar calibrate" in advice
    assert ("wait for its data" in advice) == (factor > 1)
    assert "What may be off" in str(report)


def test_a_suspect_alone_would_explain_what_was_measured() -> None:
    plan, _ = planned()
    report = told(2.0)
    for one in report.suspects:
        rest = plan.prediction.step_time_s - one.predicted_s
        assert rest + one.factor * one.predicted_s == pytest.approx(report.step_time_s)


def test_a_plan_for_other_devices_is_said_to_be_one() -> None:
    report = told(1.0, device_kind="cpu")
    (advice,) = report.advice
    assert "the plan is for h100-sxm, but runs on 'cpu'" in advice
    assert not report.holds


def test_memory_that_is_far_off_is_said() -> None:
    plan, _ = planned()
    report = told(1.0, peak_bytes=2 * plan.prediction.peak_bytes)
    assert report.memory_off == pytest.approx(-0.5)
    assert any("peak memory differs" in line for line in report.advice)
    assert told(1.0, peak_bytes=None, memory_from=None).memory_off is None


def test_utilisation_is_the_matrix_products_by_the_peak() -> None:
    """Twelve products of 32 x 256 x 256: each layer's, and the two of its gradients but the first's of its input."""
    plan, graph = planned()
    flops = model_flops(graph)
    assert set(flops) == {"float32"}
    whole = sum(
        2.0 * np.prod(graph.values[node.results[0]].shape) * _contracted(node, graph)
        for node in graph.nodes
        if node.primitive == "dot_general"
    )
    assert flops["float32"] == pytest.approx(whole)
    report = told(1.0)
    rate = load("h100-sxm").peak_rate("float32")
    assert report.utilisation == pytest.approx(whole / (8 * rate * plan.prediction.step_time_s))


def _contracted(node: Any, graph: Any) -> int:
    (contracting, _), _ = node.params["dimension_numbers"]
    shape = graph.values[node.operands[0]].shape
    return int(np.prod([shape[d] for d in contracting]))


def test_it_is_json() -> None:
    document = json.loads(json.dumps(told(2.0).to_json(), allow_nan=False))
    assert document["format"] == "autopar-report"
    assert document["holds"] is False
    assert document["suspects"][0]["part"] in ("kernels", "collectives")
    assert document["step_time_s"] == pytest.approx(2 * document["predicted_s"])


# -- steps that ran ---------------------------------------------------------------------------


def test_a_step_reports_on_itself() -> None:
    """On CPU devices, which do not say what memory they hold: then XLA's program does."""
    program = programs.mlp(batch=32, width=64, num_layers=2)
    step = autopar.parallelize(program.step, mesh="8", hardware="cpu-host")
    args = program.args()
    with pytest.raises(StepSignatureError, match="too few steps"):
        step.report()
    state, *rest = args
    for _ in range(6):
        state = first_of(step(state, *rest))
    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: compiles.append(event))
    report = step.report()
    assert not [name for name in compiles if "backend_compile" in name], "XLA has the program already"
    assert report.num_steps == 4
    assert report.step_time_s > 0
    assert report.memory_from == "compiled"
    assert report.peak_bytes is not None and report.peak_bytes > 0
    assert report.device_kind == jax.devices()[0].device_kind
    assert "as compiled" in str(report)


def test_what_devices_say_of_their_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        process_index = 0
        device_kind = "NVIDIA H100 80GB HBM3"

        def __init__(self, peak: int) -> None:
            self.peak = peak

        def memory_stats(self) -> dict[str, int]:
            return {"peak_bytes_in_use": self.peak}

    class Grid:
        devices = np.array([Device(5), Device(7)], dtype=object)

    assert measure_step._peak_bytes(None, None, Grid()) == (7.0, "devices")  # type: ignore[arg-type]


def test_another_shape_begins_anew() -> None:
    step = autopar.parallelize(lambda x: x * 2, mesh="8", hardware="cpu-host")
    for _ in range(6):
        step(jnp.ones((8, 4)))
    step(jnp.ones((16, 4)))
    with pytest.raises(StepSignatureError, match="0 have been timed"):
        step.report()


def first_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
